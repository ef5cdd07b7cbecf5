"""The thresholds of top_k, top_p and min_p, without sorting.

Each filter asks for the highest value such that the tokens at least as high weigh enough together: ``top_k``, each
weighing one, or ``top_p`` of all, each weighing its probability. Halving the range between two tokens' values finds it,
and ends when there is one value left: a few passes. They pass over the whole row only where they must.
``survey`` writes down the peak of each tile of a row; the tokens as high as the lowest of the highest peaks are all in
the tiles of these peaks, and are nearly always enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tpserve_attn_triton.steps import follow

__all__ = ["restrict", "survey"]


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def survey(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,
    weights,
    row_stride,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The peak of each tile of a row that is filtered; a program for each row and ``ROWS`` tiles.

    Args:
        logits: ``[n, VOCABULARY]``, rows ``row_stride`` apart.
        temperature, top_k, top_p, min_p: as in :class:`tpserve.api.SamplingBatch`.
        peaks: float32 ``[n, TILES]``, written: the highest logit.
        weights: float32 ``[n, TILES]``, written: the sum of probabilities relative to that of the peak.
        TILE: tokens of a tile.
    """
    row = tl.program_id(0)
    follow(OVERLAP)
    heat = tl.load(temperature + row)
    if is_filtered(heat, tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)):
        tiles = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        x = read_tiles(logits + row.to(tl.int64) * row_stride, tiles, tiles < TILES, VOCABULARY, TILE)
        peak = tl.max(x, 1)
        weight = tl.sum(tl.exp((x - tl.maximum(peak, -3e38)[:, None]) * steepness(heat)), 1)
        tl.store(peaks + row * TILES + tiles, peak, mask=tiles < TILES)
        tl.store(weights + row * TILES + tiles, weight, mask=tiles < TILES)


@triton.jit(do_not_specialize_on_alignment=["temperature", "top_k", "top_p", "min_p"])
def restrict(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,
    weights,
    chosen,
    thresholds,
    row_stride,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    ROOM: tl.constexpr,
    MOST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The least logit of each row that its filters keep; a program for each row.

    Args:
        logits, temperature, top_k, top_p, min_p: as for :func:`survey`.
        peaks, weights: what it wrote.
        chosen: int32 ``[n, MOST]``, for the numbers of tiles.
        thresholds: float32 ``[n]``, written.
        ROWS: tiles at a time.
        ROOM: a power of two, at least ``TILES``.
        MOST: tiles that are looked at first, at most.
    """
    row = tl.program_id(0)
    follow(OVERLAP)
    heat, k, p, m = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    threshold = tl.full([], float("-inf"), tl.float32)
    if is_filtered(heat, k, p, m):
        slope = steepness(heat)
        each = tl.arange(0, ROOM)
        peak = tl.load(peaks + row * TILES + each, mask=each < TILES, other=float("-inf"))
        top = tl.max(peak, 0)
        threshold = tl.where(m > 0, top + tl.log(tl.maximum(m, 1e-30)) * heat, float("-inf"))
        limited = (k > 0) & (k < VOCABULARY)
        if limited | (p < 1):
            base = logits + row.to(tl.int64) * row_stride
            choice = peak > crowded(peak, top, MOST)
            count = tl.sum(choice.to(tl.int32), 0)
            low = tl.minimum(tl.min(tl.where(choice, peak, float("inf")), 0), top)
            tiles = chosen + row * MOST
            tl.store(tiles + tl.cumsum(choice.to(tl.int32), 0) - 1, each, mask=choice)
            tl.debug_barrier()  # other threads read them
            kth = tl.full([], float("-inf"), tl.float32)
            if limited:
                kth = find(base, tiles, count, low, top, k.to(tl.float32), 0.0, VOCABULARY, TILES, TILE, ROWS)
                threshold = tl.maximum(threshold, kth)
            if p < 1:
                weight = tl.load(weights + row * TILES + each, mask=each < TILES, other=0.0)
                total = tl.sum(weight * tl.exp((peak - top) * slope), 0)
                if limited:
                    whole = kth < low
                    total, _, _ = measure(base, tiles, count, whole, kth, top, slope, VOCABULARY, TILES, TILE, ROWS)
                low = tl.maximum(low, kth)
                nucleus = find(base, tiles, count, low, top, p * total, slope, VOCABULARY, TILES, TILE, ROWS)
                threshold = tl.maximum(threshold, nucleus)
    tl.store(thresholds + row, threshold)


@triton.jit
def is_filtered(heat, k, p, m):
    """Whether there is something to do for a row."""
    return (heat > 0) & ((k > 0) | (p < 1) | (m > 0))


@triton.jit
def steepness(heat):
    """What a logit's distance is multiplied with."""
    return 1 / tl.maximum(heat, 1e-5)


@triton.jit
def crowded(peak, top, MOST: tl.constexpr):
    """The highest of the peaks that, with those as high, more than ``MOST`` reach; -inf if there are no more."""
    low = tl.full([], float("-inf"), tl.float32)
    if tl.sum((peak > low).to(tl.int32), 0) > MOST:
        low = tl.min(tl.where(peak > low, peak, float("inf")), 0)
        high = top
        while low < high:
            middle = halfway(low, high)
            above = peak >= middle
            if tl.sum(above.to(tl.int32), 0) > MOST:
                low = tl.min(tl.where(above, peak, float("inf")), 0)
            else:
                high = tl.max(tl.where(above, float("-inf"), peak), 0)
    return low


@triton.jit
def halfway(low, high):
    """A value above ``low``, and not above ``high``."""
    middle = low + (high - low) * 0.5
    return tl.where(middle > low, middle, high)


@triton.jit
def find(
    base,
    tiles,
    count,
    low,
    top,
    target,
    slope,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The highest logit such that all that are at least as high weigh ``target``, the lowest if they never do.

    Looked for among those from ``low`` on, which are in the chosen ``tiles``; if they do not weigh enough, everywhere.
    """
    high = top
    enough, _, _ = measure(base, tiles, count, False, low, top, slope, VOCABULARY, TILES, TILE, ROWS)
    whole = enough < target
    if whole:
        high = low
        _, low, _ = measure(base, tiles, count, True, -3e38, top, slope, VOCABULARY, TILES, TILE, ROWS)
    while low < high:
        middle = halfway(low, high)
        weight, above, below = measure(base, tiles, count, whole, middle, top, slope, VOCABULARY, TILES, TILE, ROWS)
        if weight >= target:
            low = above
        else:
            high = below
    return low


@triton.jit
def measure(
    base,
    tiles,
    count,
    whole,
    bound,
    top,
    slope,
    VOCABULARY: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Pass over the chosen tiles, or all if ``whole``.

    Returns:
        Of logits that are ``bound`` or more the sum of the weights exp((logit - top) * slope) and the least, and the
        greatest of the others.
    """
    total = tl.zeros([ROWS, TILE], tl.float32)
    above = tl.full([ROWS, TILE], float("inf"), tl.float32)
    below = tl.full([ROWS, TILE], float("-inf"), tl.float32)
    number = tl.where(whole, TILES, count)
    listed = tl.where(whole, 0, count)
    for first in range(0, number, ROWS):
        each = first + tl.arange(0, ROWS)
        there = each < number
        tile = tl.where(whole, each, tl.load(tiles + each, mask=each < listed, other=0))
        x = read_tiles(base, tile, there, VOCABULARY, TILE)
        inside = x >= bound
        total += tl.where(inside, tl.exp(tl.where(inside, x - top, 0.0) * slope), 0.0)
        above = tl.minimum(above, tl.where(inside, x, float("inf")))
        below = tl.maximum(below, tl.where(inside, float("-inf"), x))
    return tl.sum(total), tl.min(above), tl.max(below)


@triton.jit
def read_tiles(base, tiles, there, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    """The logits of tiles of a row: float32 ``[tiles, TILE]``, -inf outside."""
    each = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = there[:, None] & (each < VOCABULARY)
    return tl.load(base + each, mask=inside, other=float("-inf")).to(tl.float32)
