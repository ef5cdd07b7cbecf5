"""What both kernels do with a block of tokens: find its cells, read them, take them into a running softmax.

Scores are base-2 logarithms of weights. A softmax in progress is three values for each row: ``best``, the highest score
so far; ``total``, the sum of weights, and ``acc``, the sum of weighted values, both divided by 2 ** best.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["absorb", "find_cells", "read_cells"]


@triton.jit
def find_cells(pages, tokens, stop, head, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where one head of ``tokens`` is: rows of the cache, seen as ``[pages * page_size * kv_heads, head_dim]``.

    Rows fit 32 bits where numbers do not; the arithmetic on them is a large part of a block's instructions.
    """
    page = tl.load(pages + tokens // PAGE_SIZE, mask=tokens < stop, other=0)
    return (page * PAGE_SIZE + tokens % PAGE_SIZE) * KV_HEADS + head


@triton.jit
def read_cells(cache, cells, there, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    """Those rows, ``[block, COLUMNS]``, with 0 where there is nothing to read."""
    columns = tl.arange(0, COLUMNS)
    mask = there[:, None]
    if HEAD_DIM < COLUMNS:
        mask = mask & (columns < HEAD_DIM)[None, :]
    found = tl.load(cache + cells.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :], mask=mask, other=0.0)
    return found.to(tl.float32) if WIDE else found


@triton.jit
def absorb(
    q,
    k,
    v,
    tokens,
    positions,
    window,
    partly,
    best,
    total,
    acc,
    scale,
    cap,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Take the keys and values of ``tokens`` into the softmax of each row of ``q``.

    Where ``partly``, a row sees only tokens up to its position, and if ``WINDOWED`` only the last ``window`` of them.
    Without a cap ``scale`` is the factor on the scores times log2(e). With one, ``scale`` is twice that by the cap, and
    ``cap`` the cap times log2(e): so the exponential in tanh needs no factor of its own.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if CAPPED:
        scores = cap - 2 * cap / (1 + tl.exp2(scores * scale))  # cap * tanh, by exp2
    if partly:
        seen = tokens[None, :] <= positions[:, None]
        if WINDOWED:
            seen = seen & (tokens[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    if CAPPED:
        now = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - now[:, None])
    else:
        # The factor goes into the subtraction: one instruction for both.
        now = tl.maximum(best, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - now[:, None])
    shrink = tl.exp2(best - now)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return now, total, acc
