"""The kernel of the ``peer`` comm: ranks store their parts into each other's memory, and each adds up what has come."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["PLACES", "UNIT", "add_up"]

UNIT = 16
"""Bytes that a thread moves at once; a message is a multiple."""

PLACES = 3
"""Parts that a rank has room for, of each rank."""

EMPTY = tl.constexpr(-1)
"""The bits of a number that has not come; also those of a NaN, for which NAN is sent instead."""

NAN = tl.constexpr(-2)

TURNS = tl.constexpr(PLACES)
BYTES = tl.constexpr(UNIT)
LOOKS = tl.constexpr(256)
"""How often a program looks for a part between two looks at the word that stops it."""


@triton.jit(do_not_specialize=["rank", "units"])
def add_up(
    x,
    table,
    turns,
    rank,
    units,
    TYPE: tl.constexpr,
    SIZE: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace ``x`` by its sum over the ranks, in float32 and in rank order; a program for each ``BLOCK`` bytes.

    A program talks to those of its number on other ranks alone. Before it looks for what they send in this turn, it
    empties what they sent in the turn before, for the turn after the next. Nobody sends that early: who does has seen
    this rank's part of the next turn, which is sent when this kernel has ended.

    Args:
        x: the bits of ``16 * units`` bytes.
        table: the addresses of each rank's memory as this GPU sees it, and that of a word which stops all waiting when
            it is not 0.
        turns: of each program, in which of the places it is; advanced.
        TYPE: what the bits are.
        SIZE: ranks.
        ROOM: bytes of a part. A rank's memory is ``[PLACES, SIZE, ROOM]``, and empty at first.
    """
    BITS: tl.constexpr = x.dtype.element_ty
    WIDE: tl.constexpr = BITS.primitive_bitwidth // 8
    LENGTH: tl.constexpr = BLOCK // WIDE
    ROW: tl.constexpr = ROOM // WIDE
    PLACE: tl.constexpr = SIZE * ROW
    program = tl.program_id(0)
    here = program * LENGTH + tl.arange(0, LENGTH)
    inside = here < units * (BYTES // WIDE)
    turn = tl.load(turns + program)
    mine = tl.load(x + here, mask=inside, other=0)
    mine = tl.where(mine == EMPTY, NAN, mine).to(BITS)
    for step in tl.static_range(1, SIZE):
        peer = tl.multiple_of(tl.load(table + (rank + step) % SIZE), BYTES).to(tl.pointer_type(BITS))
        tl.store(
            tl.multiple_of(peer, BYTES) + turn * PLACE + rank * ROW + here, mine, mask=inside, cache_modifier=".wt"
        )
    own = tl.multiple_of(tl.load(table + rank).to(tl.pointer_type(BITS)), BYTES)
    for step in tl.static_range(1, SIZE):
        row = (turn + TURNS - 1) % TURNS * PLACE + (rank + step) % SIZE * ROW
        tl.store(own + row + here, tl.full([LENGTH], EMPTY, BITS))
    stop = tl.load(table + SIZE).to(tl.pointer_type(tl.int32))
    total = tl.zeros([LENGTH], tl.float32)
    for peer in tl.static_range(SIZE):
        bits = mine
        if peer != rank:
            part = own + turn * PLACE + peer * ROW + here
            bits = tl.load(part, mask=inside, other=0, volatile=True)
            missing = tl.max((bits == EMPTY).to(tl.int32), 0)
            looks = 0
            while missing > 0:
                bits = tl.load(part, mask=inside, other=0, volatile=True)
                missing = tl.max((bits == EMPTY).to(tl.int32), 0)
                looks += 1
                if looks == LOOKS:
                    looks = 0
                    missing *= (tl.load(stop, volatile=True) == 0).to(tl.int32)
        total += bits.to(TYPE, bitcast=True).to(tl.float32)
    tl.store(x + here, total.to(TYPE).to(BITS, bitcast=True), mask=inside)
    tl.debug_barrier()  # all threads have read the turn
    tl.store(turns + program, (turn + 1) % TURNS)
