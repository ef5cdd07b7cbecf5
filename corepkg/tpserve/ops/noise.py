"""The sampling noise: a counter-based generator, so that a token's noise depends on (seed, position, token id) alone.

In unsigned 64-bit arithmetic modulo 2**64, with ``>>>`` a logical shift and γ = 0x9E3779B97F4A7C15::

    mix(z):  z = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9
             z = (z ^ (z >>> 27)) * 0x94D049BB133111EB
             return z ^ (z >>> 31)

    key  = mix(mix(seed) + (position + 1) * γ)        one for each row
    bits = mix(key + (token + 1) * γ)                 one for each token id
    u    = ((bits >>> 40) | 1) * 2**-24               odd multiples of 2**-24: never 0, never 1, exact in float32
    g    = -ln(-ln(u))                                in float32

``mix`` is the finaliser of SplitMix64 (Steele, Lea & Flood, 2014), and a row's bits are that generator's output from
the state ``key``. Everything up to ``u`` is exact, so implementations agree in all bits; the logarithms differ in the
last places. ``g`` lies in [-2.82, 16.64]: a token less likely than 2**-24 is drawn a little less often than it should.

Here the integers are torch's int64, whose sums and products wrap around; a logical shift is an arithmetic one with
the copied sign bits masked off.
"""

from __future__ import annotations

import torch

__all__ = ["gumbel", "row_keys", "uniforms"]

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MULTIPLIERS = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))


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
    return _mix_(_mix_(seed.clone()) + (position + 1) * _GAMMA)


def uniforms(keys: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Uniform numbers in (0, 1) for token ids 0 … ``vocabulary - 1``: float32 ``[n, vocabulary]`` for int64 ``[n]``."""
    steps = torch.arange(1, vocabulary + 1, device=keys.device).mul_(_GAMMA)
    bits = _mix_(keys.unsqueeze(1) + steps)
    top = bits.bitwise_right_shift_(40).bitwise_and_((1 << 24) - 1).bitwise_or_(1)
    return top.to(torch.float32).mul_(2.0**-24)


def _mix_(z: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, in place."""
    z.bitwise_xor_(_shifted(z, 30)).mul_(_MULTIPLIERS[0])
    z.bitwise_xor_(_shifted(z, 27)).mul_(_MULTIPLIERS[1])
    return z.bitwise_xor_(_shifted(z, 31))


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right logically."""
    return (z >> by).bitwise_and_((1 << (64 - by)) - 1)
