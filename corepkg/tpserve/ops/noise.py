"""The sampling noise: a counter-based generator, so that a token's noise depends on (seed, position, token id) alone.

A row's key is mixed in unsigned 64-bit arithmetic, each token's bits from it in unsigned 32-bit arithmetic, which is
several times cheaper over a vocabulary; ``>>>`` is a logical shift and γ = 0x9E3779B97F4A7C15::

    mix64(z):  z = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9
               z = (z ^ (z >>> 27)) * 0x94D049BB133111EB
               return z ^ (z >>> 31)

    mix32(x):  x = (x ^ (x >>> 16)) * 0x7FEB352D
               x = (x ^ (x >>> 15)) * 0x846CA68B
               return x ^ (x >>> 16)

    key  = mix64(mix64(seed) + (position + 1) * γ)             one for each row
    bits = mix32(mix32(token ^ low32(key)) + high32(key))      one for each token id
    u    = ((bits >>> 8) | 1) * 2**-24                         odd multiples of 2**-24: never 0 or 1, exact in float32
    g    = -ln(-ln(u))                                         in float32

``mix64`` is the finaliser of SplitMix64 (Steele, Lea & Flood, 2014); ``mix32`` has the constants that Wellons found by
search for the least bias (lowbias32, 2018). For one row, ``bits`` is a permutation of the 32-bit token ids. Everything
up to ``u`` is exact, so implementations agree in all bits; the logarithms differ in the last places. ``g`` lies in
[-2.82, 16.64]: a token less likely than 2**-24 is drawn a little less often than it should.

Here the integers are torch's signed ones, whose sums and products wrap around; a logical shift is an arithmetic one
with the copied sign bits masked off.
"""

from __future__ import annotations

import torch

__all__ = ["gumbel", "row_keys", "uniforms"]


def _signed(value: int, bits: int) -> int:
    """The signed integer with the bits of an unsigned one."""
    return value - (value >> (bits - 1) << bits)


_GAMMA = _signed(0x9E3779B97F4A7C15, 64)
_STEPS_64 = ((30, _signed(0xBF58476D1CE4E5B9, 64)), (27, _signed(0x94D049BB133111EB, 64)), (31, 1))
_STEPS_32 = ((16, _signed(0x7FEB352D, 32)), (15, _signed(0x846CA68B, 32)), (16, 1))


def gumbel(seed: torch.Tensor, position: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Standard Gumbel noise.

    Args:
        seed: int64 ``[n]``.
        position: int64 ``[n]``.
        vocabulary: how many token ids, from 0.

    Returns:
        float32 ``[n, vocabulary]``.
    """
    return uniforms(row_keys(seed, position), vocabulary).log_().neg_().log_().neg_()


def row_keys(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """The key of each row: int64 ``[n]`` for int64 ``[n]`` each."""
    return _mix_(_mix_(seed.clone(), _STEPS_64) + (position + 1) * _GAMMA, _STEPS_64)


def uniforms(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Uniform numbers in (0, 1) for token ids 0 … ``vocabulary - 1``: float32 ``[n, vocabulary]`` for int64 ``[n]``."""
    keys = keys.unsqueeze(1)
    low, high = keys.to(torch.int32), (keys >> 32).to(torch.int32)
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=keys.device)
    bits = _mix_(_mix_(tokens ^ low, _STEPS_32).add_(high), _STEPS_32)
    return _shift(bits, 8, out=bits).bitwise_or_(1).to(torch.float32).mul_(2.0**-24)


def _mix_(x: torch.Tensor, steps: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """Mix in place: xor with itself shifted, then multiply, for each (shift, factor)."""
    shifted = torch.empty_like(x)
    for shift, factor in steps:
        x ^= _shift(x, shift, out=shifted)
        if factor != 1:
            x *= factor
    return x


def _shift(x: torch.Tensor, by: int, out: torch.Tensor) -> torch.Tensor:
    """Shift right logically, into ``out``."""
    return torch.bitwise_right_shift(x, by, out=out).bitwise_and_((1 << (8 * x.itemsize - by)) - 1)
