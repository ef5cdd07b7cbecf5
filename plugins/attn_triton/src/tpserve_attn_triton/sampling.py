"""Drawing: one pass over the logits, and a small one over what its programs found.

The noise is that of :mod:`tpserve.ops.noise`: the same bits, of which only logarithms may differ in the last places.
The highest sum of a score and Gumbel noise, ``s - ln(e)``, is where ``e / exp(s)`` is least, which saves a logarithm.

What a token could reach at the most is known before its noise is: a block where none can win any more is left at once.
Neither this nor how rows are divided changes what is drawn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpserve_attn_triton.steps import follow

__all__ = ["draw", "settle"]


@triton.jit(
    do_not_specialize=["blocks"],
    do_not_specialize_on_alignment=["temperature", "seed", "position"],
)
def draw(
    logits,
    temperature,
    seed,
    position,
    thresholds,
    scores,
    tokens,
    row_stride,
    blocks,
    VOCABULARY: tl.constexpr,
    BLOCK: tl.constexpr,
    FILTERED: tl.constexpr,
    OVERLAP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Find the best token of a part of a row; a program for each row and part.

    Args:
        logits: ``[n, VOCABULARY]``, rows ``row_stride`` apart.
        temperature, seed, position: as in :class:`tpserve.api.SamplingBatch`.
        thresholds: float32 ``[n]``, the least logit of each row that may be drawn; read if ``FILTERED``.
        scores: float32 ``[n, parts]``, written: the best logit ÷ temperature + noise, to base 2; or logit, if greedy.
        tokens: int32 ``[n, parts]``, written: the first token that has it.
        blocks: of each part, ``BLOCK`` tokens each.
        NATIVE: whether the device's own logarithm can be used.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    start = part * blocks * BLOCK
    follow(OVERLAP)
    base = logits + row.to(tl.int64) * row_stride
    heat = tl.load(temperature + row)
    random = heat > 0
    # Below that the quotient of a logit could overflow, and the draw is greedy anyway.
    scale = tl.where(random, 1.4426950408889634 / tl.maximum(heat, 1e-5), 1.0)
    key = row_key(tl.load(seed + row), tl.load(position + row))
    kept = tl.load(thresholds + row) if FILTERED else 0.0
    hope = tl.where(random, 24.1, 0.0)  # more than the noise's most
    best, token = tl.full([], float("-inf"), tl.float32), start
    for first in range(start, tl.minimum(start + blocks * BLOCK, VOCABULARY), BLOCK):
        each = first + tl.arange(0, BLOCK)
        score = tl.load(base + each, mask=each < VOCABULARY, other=float("-inf")).to(tl.float32)
        if FILTERED:
            score = tl.where(score < kept, float("-inf"), score)
        score *= scale
        top = tl.max(score, 0)
        if top + hope > best:
            if random:
                rate = exponential(key, each, NATIVE) * tl.exp2(top - score)
                least = tl.min(rate, 0)
                reached = top - tl.log2(least)
                if reached > best:
                    best = reached
                    token = tl.min(tl.where(rate == least, each, VOCABULARY - 1), 0)
            else:
                best = top
                token = tl.min(tl.where(score == top, each, VOCABULARY - 1), 0)
    place = row * tl.num_programs(1) + part
    tl.store(scores + place, best)
    tl.store(tokens + place, token)


@triton.jit(do_not_specialize=["parts"])
def settle(scores, tokens, out, parts, ROOM: tl.constexpr, OVERLAP: tl.constexpr):
    """The best of each row's parts, the first of equals; a program for each row.

    Args:
        scores, tokens: what :func:`draw` wrote.
        out: int64 ``[n]``, written.
        ROOM: a power of two, at least ``parts``.
    """
    row = tl.program_id(0)
    each = tl.arange(0, ROOM)
    follow(OVERLAP)
    score = tl.load(scores + row * parts + each, mask=each < parts, other=float("-inf"))
    token = tl.load(tokens + row * parts + each, mask=each < parts, other=2147483647)
    best = tl.max(score, 0)
    tl.store(out + row, tl.min(tl.where(score == best, token, 2147483647), 0).to(tl.int64))


@triton.jit
def exponential(key, token, NATIVE: tl.constexpr):
    """Exponential noise of each token for a row's key: float32, ``-ln(u) = exp(-g)`` for Gumbel noise ``g``.

    The device's own logarithm is coarse near 1, where what wins nearly always lies: there a series takes its place.
    """
    bits = mix32(mix32(token.to(tl.uint32) ^ key.to(tl.uint32)) + (key >> 32).to(tl.uint32))
    v = (16777216 - ((bits >> 8) | 1).to(tl.int32)).to(tl.float32) * (1.0 / 16777216)  # 1 - u, exactly
    if NATIVE:
        log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [1 - v], tl.float32, True, 1)
    else:
        log2 = tl.log2(1 - v)
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return tl.where(v < 0.125, series, -0.6931471805599453 * log2)


@triton.jit
def row_key(seed, position):
    """The key of a row: uint64."""
    return mix64(mix64(seed.to(tl.uint64)) + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def mix64(z):
    """Mix the bits of a uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit
def mix32(x):
    """Mix the bits of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)
