"""Products of few rows with a weight: what they cost is reading the weight once.

``matvec`` is for one row: a program holds rows of the weight in registers, and has the next ones under way while it
multiplies. Its first ones it asks for before the kernel before has ended, for they do not depend on it.

``narrow`` is for up to 16 rows, on tensor cores: the columns of the weight are divided between the warps of a program,
whose sums are added at the end; one program alone for each row of the weight keeps the order of summation, and with
it the bits, independent of how many rows there are.

``wide`` is for up to 128 rows and large weights: the copy engine brings tiles of both, and the tensor cores take the
weight's rows for those of a tile, so that few rows of ``x`` waste nothing. Where there are too few tiles for all
multiprocessors, the columns are divided between programs, and whatever follows adds up their sums.

With ``GATED``, a weight is two, one below the other, and the result is ``silu`` of the first product times the second.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpserve_attn_triton.steps import follow

__all__ = ["MOST_ROWS", "matvec", "narrow", "wide"]

MOST_ROWS = 16
"""Rows of ``x`` that ``narrow`` can multiply."""


@triton.jit
def matvec(
    x,
    weight,
    bias,
    out,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply one row; a program for each ``BLOCK`` rows of the weight.

    Args:
        x: ``[IN]``.
        weight: ``[OUT, IN]``, or ``[2 * OUT, IN]`` if ``GATED``, contiguous; ``bias`` as long.
        out: ``[OUT]``, written.
        COLUMNS: columns of the weight at a time, a power of two.
    """
    rows = weight_rows(OUT, BLOCK, GATED)
    columns = tl.arange(0, COLUMNS)
    where = weight + rows.to(tl.int64)[:, None] * IN + columns[None, :]
    block = read(where, columns[None, :] < IN, IN % COLUMNS == 0)
    follow(OVERLAP)
    total = tl.zeros([BLOCK, COLUMNS], tl.float32)
    for start in range(0, IN - COLUMNS, COLUMNS):
        ahead = start + COLUMNS
        coming = read(where + ahead, ahead + columns[None, :] < IN, IN % COLUMNS == 0)
        total += block.to(tl.float32) * tl.load(x + start + columns).to(tl.float32)[None, :]
        block = coming
    START: tl.constexpr = (IN - 1) // COLUMNS * COLUMNS
    last = read(x + START + columns, START + columns < IN, IN % COLUMNS == 0)
    total += block.to(tl.float32) * last.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if BIASED:
        result += tl.load(bias + rows).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(result, (2, BLOCK // 2))))
        result = gate * tl.sigmoid(gate) * up
    outs = out_columns(BLOCK, GATED)
    tl.store(out + outs, result.to(out.dtype.element_ty), mask=outs < OUT)


@triton.jit(do_not_specialize=["n"])
def narrow(
    x,
    weight,
    bias,
    out,
    n,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply ``n`` rows, 16 at most; a program for each ``BLOCK`` rows of the weight.

    Args:
        x: ``[n, IN]``, contiguous.
        weight, bias: as for :func:`matvec`.
        out: ``[n, OUT]``, written.
        COLUMNS: columns of the weight at a time in each part, a power of two, at least 16.
        PARTS: in how many the columns are divided.
        WIDE: whether to multiply in float32, whatever the dtype.
    """
    SHARE: tl.constexpr = (IN + PARTS * COLUMNS - 1) // (PARTS * COLUMNS) * COLUMNS
    WHOLE: tl.constexpr = SHARE * PARTS == IN
    each = tl.arange(0, 16)
    there = each < n
    rows = weight_rows(OUT, BLOCK, GATED)
    columns = (tl.arange(0, PARTS) * SHARE)[:, None, None] + tl.arange(0, COLUMNS)[None, None, :]
    weights = weight + rows.to(tl.int64)[None, :, None] * IN + columns
    inputs = x + each[None, :, None] * IN + columns
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([PARTS, 16, BLOCK], tl.float32)
    for start in range(0, SHARE, COLUMNS):
        inside = start + columns < IN
        some = tl.load(inputs + start, mask=there[None, :, None] & (inside | WHOLE), other=0.0)
        block = read(weights + start, inside, WHOLE)
        if WIDE:
            some, block = some.to(tl.float32), block.to(tl.float32)
        total = tl.dot(some, tl.permute(block, (0, 2, 1)), total)
    if OVERLAP:
        # No sooner: it would take room that the programs of this one need.
        tl.extra.cuda.gdc_launch_dependents()
    result = tl.sum(total, 0)
    if BIASED:
        result += tl.load(bias + rows).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, (16, 2, BLOCK // 2)), (0, 2, 1)))
        result = gate * tl.sigmoid(gate) * up
    outs = out_columns(BLOCK, GATED)
    tl.store(
        out + each[:, None] * OUT + outs[None, :],
        result.to(out.dtype.element_ty),
        mask=there[:, None] & (outs < OUT)[None, :],
    )


@triton.jit(do_not_specialize=["n"])
def wide(
    x,
    weight,
    bias,
    out,
    n,
    OUT,
    IN,
    SHARE,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TURNED: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    OVERLAP: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Multiply ``n`` rows, ``ROWS`` at most; a program for each ``BLOCK`` rows of the weight and part of its columns.

    Args:
        x: a descriptor of ``[n, IN]``, blocks ``[ROWS, COLUMNS]``.
        weight: one of ``[OUT, IN]`` or, if ``GATED``, ``[2 * OUT, IN]``; blocks of ``BLOCK`` rows, or half as many. If
            ``TURNED``, it lies the other way round, and so do its blocks.
        bias: as for :func:`narrow`.
        out: ``[parts, n, OUT]``, written; if ``GATED`` or ``BIASED``, there is one part.
        SHARE: columns of a part, a multiple of ``COLUMNS``.
        COLUMNS: columns of the weight at a time, a power of two.
        WIDE: whether to multiply in float32, whatever the dtype.
    """
    WIDTH: tl.constexpr = BLOCK // 2 if GATED else BLOCK
    start, part = tl.program_id(0) * WIDTH, tl.program_id(1)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    result = tl.zeros([WIDTH, ROWS], tl.float32)
    up = tl.zeros([WIDTH, ROWS], tl.float32)
    for column in range(part * SHARE, tl.minimum(part * SHARE + SHARE, IN), COLUMNS):
        some = x.load([0, column])
        if WIDE:
            some = some.to(tl.float32)
        result = tl.dot(tile(weight, start, column, TURNED, WIDE), some.T, result)
        if GATED:
            up = tl.dot(tile(weight, OUT + start, column, TURNED, WIDE), some.T, up)
    if OVERLAP:
        # No sooner: it would take room that the programs of this one need.
        tl.extra.cuda.gdc_launch_dependents()
    outs, rows = start + tl.arange(0, WIDTH), tl.arange(0, ROWS)
    inside = outs < OUT
    if BIASED:
        result += tl.load(bias + outs, mask=inside, other=0.0).to(tl.float32)[:, None]
    if GATED:
        if BIASED:
            up += tl.load(bias + OUT + outs, mask=inside, other=0.0).to(tl.float32)[:, None]
        result = result * tl.sigmoid(result) * up
    tl.store(
        out + (part * n + rows[None, :]) * OUT + outs[:, None],
        result.to(out.dtype.element_ty),
        mask=(rows < n)[None, :] & inside[:, None],
    )


@triton.jit
def tile(weight, row, column, TURNED: tl.constexpr, WIDE: tl.constexpr):
    """A block of the weight, rows first."""
    block = weight.load([column, row]).T if TURNED else weight.load([row, column])
    return block.to(tl.float32) if WIDE else block


@triton.jit
def out_columns(BLOCK: tl.constexpr, GATED: tl.constexpr):
    """The columns of the result that this program computes."""
    WIDTH: tl.constexpr = BLOCK // 2 if GATED else BLOCK
    return tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def weight_rows(OUT: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr):
    """The rows of the weight for them, the last again for columns past the end; int32 ``[BLOCK]``."""
    each = tl.arange(0, BLOCK)
    if GATED:
        WIDTH: tl.constexpr = BLOCK // 2
        rows = tl.minimum(tl.program_id(0) * WIDTH + each % WIDTH, OUT - 1) + each // WIDTH * OUT
    else:
        rows = tl.minimum(tl.program_id(0) * BLOCK + each, OUT - 1)
    return rows


@triton.jit
def read(pointers, inside, WHOLE: tl.constexpr):
    """Load, with zeros outside."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=inside, other=0.0)
