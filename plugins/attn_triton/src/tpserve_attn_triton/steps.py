"""The small steps of a decoder layer, each one pass over its rows, in float32 whatever the dtype.

``OVERLAP`` in these and the other kernels of the ops: the kernel is launched while the one before still runs
(programmatic dependent launch), so it waits for that one before it reads what may have been computed there.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["follow", "rms_norm", "rotate_and_store", "silu_and_mul"]


@triton.jit
def follow(OVERLAP: tl.constexpr):
    """Let the next kernel be launched, and wait until the one before has written everything."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    out,
    eps,
    size,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm ``x``, or if ``ADD`` the sum that is left in ``residual``; a program for each row.

    Args:
        x: ``[PARTS, n, HIDDEN]``, to be added up.
        residual, out: ``[n, HIDDEN]``; may be the same, and the first part.
        weight: ``[HIDDEN]``.
        size: of a part of ``x``.
        COLUMNS: the power of two that holds ``HIDDEN``.
    """
    start = tl.program_id(0).to(tl.int64) * HIDDEN
    columns = tl.arange(0, COLUMNS)
    inside = columns < HIDDEN
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    follow(OVERLAP)
    value = add_up(x + start + columns, size, inside, PARTS)
    if ADD:
        value += tl.load(residual + start + columns, mask=inside, other=0.0).to(tl.float32)
        total = value.to(residual.dtype.element_ty)
        tl.store(residual + start + columns, total, mask=inside)
        value = total.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    tl.store(out + start + columns, (value * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["cache_slots"])
def rotate_and_store(
    qkv,
    cos_sin,
    k_cache,
    v_cache,
    cache_slots,
    q_norm,
    k_norm,
    q,
    eps,
    size,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm and rotate query and key heads, store keys and values; a program for each token and ``HEADS`` heads.

    Args:
        qkv, cos_sin, k_cache, v_cache, cache_slots, q_norm, k_norm: as in :meth:`tpserve.api.Ops.rotate_and_store`.
        q: ``[tokens, Q_HEADS, HEAD_DIM]``, written.
        size: of a part of ``qkv``, of which there are ``PARTS`` to be added up.
        COLUMNS: the power of two that holds half a head.
        NORMED: whether there are norms.
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, COLUMNS)
    HALF: tl.constexpr = HEAD_DIM // 2
    inside = (columns < HALF)[None, :]
    key, value = heads >= Q_HEADS, heads >= Q_HEADS + KV_HEADS
    last = heads < Q_HEADS + 2 * KV_HEADS
    follow(OVERLAP)
    where = qkv + (token * (Q_HEADS + 2 * KV_HEADS) + heads[:, None]) * HEAD_DIM + columns[None, :]
    there = last[:, None] & inside
    left, right = add_up(where, size, there, PARTS), add_up(where + HALF, size, there, PARTS)
    cos = tl.load(cos_sin + token * HEAD_DIM + columns[None, :], mask=inside, other=0.0)
    sin = tl.load(cos_sin + token * HEAD_DIM + HALF + columns[None, :], mask=inside, other=0.0)
    slot = tl.load(cache_slots + token)
    first, second = left, right
    if NORMED:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + eps)[:, None]
        first *= scale * pick(key, k_norm, q_norm, columns, inside)
        second *= scale * pick(key, k_norm, q_norm, HALF + columns, inside)
    dtype = q.dtype.element_ty
    turned_left = (first * cos - second * sin).to(dtype)
    turned_right = (second * cos + first * sin).to(dtype)

    put(q + (token * Q_HEADS + heads[:, None]) * HEAD_DIM, turned_left, turned_right, ~key, columns, HALF)
    keys = k_cache + (slot * KV_HEADS + heads[:, None] - Q_HEADS) * HEAD_DIM
    put(keys, turned_left, turned_right, key & ~value, columns, HALF)
    values = v_cache + (slot * KV_HEADS + heads[:, None] - Q_HEADS - KV_HEADS) * HEAD_DIM
    put(values, left, right, value & last, columns, HALF)


@triton.jit
def add_up(where, size, there, PARTS: tl.constexpr):
    """The sum of the parts, float32."""
    total = tl.load(where, mask=there, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(where + part * size, mask=there, other=0.0).to(tl.float32)
    return total


@triton.jit
def pick(second, if_second, if_first, columns, inside):
    """A row of weights for each head: float32."""
    one = tl.load(if_first + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(if_second + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(second[:, None], other, one)


@triton.jit
def put(rows, left, right, there, columns, HALF: tl.constexpr):
    """Store both halves of those heads that are ``there``."""
    mask = there[:, None] & (columns < HALF)[None, :]
    tl.store(rows + columns[None, :], left.to(rows.dtype.element_ty), mask=mask)
    tl.store(rows + HALF + columns[None, :], right.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Activate; a program for each row and ``BLOCK`` columns of ``out`` ``[n, SIZE]``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    follow(OVERLAP)
    gate = tl.load(gate_up + row * 2 * SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
