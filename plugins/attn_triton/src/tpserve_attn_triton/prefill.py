"""Sequences with several new tokens, behind a cached prefix or not: a program for each block of query rows.

The rows of a program are the query heads of one group, for some tokens in a row: each key and value is read once for
all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpserve_attn_triton.blocks import absorb, find_cells, read_cells

__all__ = ["prefill"]


@triton.jit(do_not_specialize=["window"])
def prefill(
    query,
    k_cache,
    v_cache,
    table,
    blocks,
    out,
    query_token,
    query_head,
    table_row,
    scale,
    cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend; a program for each block of query rows and KV head.

    Args:
        query, k_cache, v_cache, out: as in :meth:`tpserve.api.Attention.run`.
        table: the page table.
        blocks: int32 ``[blocks, 4]``: first row of the query, its position, tokens (``ROWS // GROUP`` at most), slot.
        query_token, query_head, table_row: strides.
        scale, cap: what :func:`~tpserve_attn_triton.blocks.absorb` wants.
        window: how many tokens back a token sees, itself included, if ``WINDOWED``.
        ROWS, COLUMNS: powers of two, at least 16.
        BLOCK: keys at a time.
        WIDE: whether to compute in float32, whatever the dtype.
    """
    head, numbers = tl.program_id(0) % KV_HEADS, blocks + tl.program_id(0) // KV_HEADS * 4
    row, position = tl.load(numbers).to(tl.int64), tl.load(numbers + 1)
    count, slot = tl.load(numbers + 2), tl.load(numbers + 3).to(tl.int64)
    pages = table + slot * table_row

    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tokens, heads = rows // GROUP, head * GROUP + rows % GROUP
    inside = (tokens < count)[:, None] & (columns < HEAD_DIM)[None, :]
    where = query + (row + tokens)[:, None] * query_token + heads[:, None] * query_head + columns[None, :]
    q = tl.load(where, mask=inside, other=0.0)
    if WIDE:
        q = q.to(tl.float32)
    best = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)

    positions = position + tokens
    stop = position + count
    start = tl.maximum(position + 1 - window, 0) if WINDOWED else 0
    for first in range(start, stop, BLOCK):
        keys = first + tl.arange(0, BLOCK)
        cells = find_cells(pages, keys, stop, head, KV_HEADS, PAGE_SIZE)
        k = read_cells(k_cache, cells, keys < stop, HEAD_DIM, COLUMNS, WIDE)
        v = read_cells(v_cache, cells, keys < stop, HEAD_DIM, COLUMNS, WIDE)
        partly = first + BLOCK > position + 1
        if WINDOWED:
            partly = partly | (first + window < stop)
        best, total, acc = absorb(
            q, k, v, keys, positions, window, partly, best, total, acc, scale, cap, WINDOWED, CAPPED
        )

    mean = acc / tl.where(total == 0, 1.0, total)[:, None]
    where = out + ((row + tokens)[:, None] * KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM + columns[None, :]
    tl.store(where, mean.to(out.dtype.element_ty), mask=inside)
