"""Sequences with one new token: their caches are read in parts, which are put together afterwards.

The query heads of a group are the rows of one matrix product: each key and value is read once for all of them. A long
cache is cut into parts, each computed by a program of its own (flash decoding, https://pytorch.org/blog/flash-decoding);
of the programs of one sequence and head, the one that ends last combines what all have found.

How to cut is decided on the device, from lengths on the device, and the number of programs follows from the number of
sequences alone: so a CUDA graph that holds both kernels is right for whatever lengths it is replayed with.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpserve_attn_triton.blocks import absorb, find_cells, read_cells

__all__ = ["FIELDS", "cut", "decode"]

FIELDS = 8
"""Room for the numbers of a part: row of the query, slot, first token, token after the last, and of its sequence the
first part and how many."""


@triton.jit(
    do_not_specialize=["count", "spare", "window"],
    do_not_specialize_on_alignment=["members", "slots", "kv_lens", "query_starts"],
)
def cut(
    members,
    slots,
    kv_lens,
    query_starts,
    parts,
    used,
    count,
    spare,
    window,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Cut ``count`` sequences into at most ``count + spare`` parts, the longest as short as can be; one program.

    Args:
        members: int32 ``[count]``, the sequences' numbers in the batch.
        slots, kv_lens, query_starts: of the batch.
        parts: int32 ``[count + spare, FIELDS]``, written.
        used: int32 ``[1]``, written: how many parts there are.
        count: sequences.
        spare: more parts than sequences, at most.
        window: tokens that each sees; 0 for all.
        ROOM: a power of two, at least ``count``.
        BLOCK: parts, but for a sequence's last, are multiples of this.
        FIELDS: numbers of a part.
    """
    each = tl.arange(0, ROOM)
    there = each < count
    member = tl.load(members + each, mask=there, other=0)
    start, stop = seen(kv_lens, member, there, window)
    blocks = tl.cdiv(stop - start, BLOCK)
    most = tl.maximum(tl.cdiv(tl.sum(blocks, 0), spare), 1)
    # Long parts first: what begins last should not take longest.
    length = tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, most), 1))
    order = tl.sort(tl.where(there, length * ROOM + each, -1), descending=True) % ROOM
    member = tl.load(members + order, mask=there, other=0)
    start, stop = seen(kv_lens, member, there, window)
    blocks = tl.cdiv(stop - start, BLOCK)
    pieces = tl.where(there, tl.maximum(tl.cdiv(blocks, most), 1), 0)
    size = tl.cdiv(blocks, tl.maximum(pieces, 1)) * BLOCK
    first = tl.cumsum(pieces, 0) - pieces
    row = tl.load(query_starts + member, mask=there, other=0)
    slot = tl.load(slots + member, mask=there, other=0).to(tl.int32)
    tl.store(used, tl.sum(pieces, 0))
    for piece in range(tl.max(pieces, 0)):
        has = piece < pieces
        where = parts + (first + piece) * FIELDS
        begin = start + piece * size
        tl.store(where, row, mask=has)
        tl.store(where + 1, slot, mask=has)
        tl.store(where + 2, begin, mask=has)
        tl.store(where + 3, tl.minimum(begin + size, stop), mask=has)
        tl.store(where + 4, first, mask=has)
        tl.store(where + 5, pieces, mask=has)


@triton.jit
def seen(kv_lens, member, there, window):
    """The first token that each sees, and the one after the last."""
    stop = tl.load(kv_lens + member, mask=there, other=0)
    return tl.where(window > 0, tl.maximum(stop - window, 0), 0), stop


@triton.jit
def decode(
    query,
    k_cache,
    v_cache,
    table,
    parts,
    used,
    out,
    means,
    scores,
    arrived,
    query_token,
    query_head,
    table_row,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
    FIELDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Attend; a program for each part and KV head.

    Args:
        query, k_cache, v_cache, out: as in :meth:`tpserve.api.Attention.run`.
        table: the page table.
        parts, used: what :func:`cut` wrote.
        means: float32 ``[parts, heads, head_dim]``, for the results of parts.
        scores: float32 ``[parts, heads]``, for the logarithms of their sums of weights.
        arrived: int32 ``[parts, kv_heads]``, zeros before and after: parts that are done, counted at the first.
        query_token, query_head, table_row: strides.
        scale, cap: what :func:`~tpserve_attn_triton.blocks.absorb` wants.
        HEADS: the power of two that holds ``GROUP``.
        ROWS, COLUMNS: powers of two that hold ``GROUP`` and ``HEAD_DIM``, at least 16.
        BLOCK: tokens at a time.
        WIDE: whether to compute in float32, whatever the dtype.
        OVERLAP: the kernel may be launched while the one before still runs (programmatic dependent launch), but not
            while :func:`cut` does.
    """
    head, part = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    if part >= tl.load(used):
        return
    numbers = parts + part * FIELDS
    row = tl.load(numbers).to(tl.int64)
    pages = table + tl.load(numbers + 1).to(tl.int64) * table_row
    start, stop = tl.load(numbers + 2), tl.load(numbers + 3)
    first, pieces = tl.load(numbers + 4), tl.load(numbers + 5)

    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    heads = head * GROUP + rows
    alive = rows < GROUP
    inside = alive[:, None] & (columns < HEAD_DIM)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    q = tl.load(query + row * query_token + heads[:, None] * query_head + columns[None, :], mask=inside, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    last = tl.full([ROWS], 0, tl.int32) + stop - 1
    for position in range(start, stop, BLOCK):
        keys = position + tl.arange(0, BLOCK)
        cells = find_cells(pages, keys, stop, head, KV_HEADS, PAGE_SIZE)
        k = read_cells(k_cache, cells, keys < stop, HEAD_DIM, COLUMNS, WIDE)
        v = read_cells(v_cache, cells, keys < stop, HEAD_DIM, COLUMNS, WIDE)
        partly = position + BLOCK > stop
        best, total, acc = absorb(q, k, v, keys, last, 0, partly, best, total, acc, scale, cap, False, CAPPED)
    if OVERLAP:
        # No sooner: it would take room that the programs of this one need.
        tl.extra.cuda.gdc_launch_dependents()
    mean = acc / tl.where(total == 0, 1.0, total)[:, None]
    result = out + (row * KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM + columns[None, :]

    if pieces == 1:
        tl.store(result, mean.to(out.dtype.element_ty), mask=inside)
    else:
        place = part * KV_HEADS * GROUP + heads
        tl.store(means + place[:, None] * HEAD_DIM + columns[None, :], mean, mask=inside)
        tl.store(scores + place, best + tl.log2(total), mask=alive)
        tl.debug_barrier()  # all threads have written before one of them says so
        counter = arrived + first * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
            combine(means, scores, out, row, head, first, pieces, KV_HEADS, GROUP, HEADS, HEAD_DIM, COLUMNS)
            tl.store(counter, 0)


@triton.jit
def combine(
    means,
    scores,
    out,
    row,
    head,
    first,
    pieces,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Put the results of one sequence's parts together, for one KV head."""
    rows, columns = tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    heads = head * GROUP + rows
    inside = (rows < GROUP)[:, None] & (columns < HEAD_DIM)[None, :]
    best = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, COLUMNS], tl.float32)
    # Unrolled, so that several loads are under way at once. They pass by L1, which does not see what others store.
    for part in tl.range(first, first + pieces, loop_unroll_factor=8):
        place = part * KV_HEADS * GROUP + heads
        where = means + place[:, None] * HEAD_DIM + columns[None, :]
        score = tl.load(scores + place, mask=rows < GROUP, other=-1e30, cache_modifier=".cg")
        mean = tl.load(where, mask=inside, other=0.0, cache_modifier=".cg")
        now = tl.maximum(best, score)
        shrink, weight = tl.exp2(best - now), tl.exp2(score - now)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + mean * weight[:, None]
        best = now
    where = out + (row * KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM + columns[None, :]
    tl.store(where, (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
