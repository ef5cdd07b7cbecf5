"""Rotary positions: the table of cosines and sines that the ``ops`` kind reads."""

from __future__ import annotations

import math

import torch

from tpserve.models.config import Rope

__all__ = ["inverse_frequencies", "rotary_table"]


def rotary_table(rope: Rope, head_dim: int, positions: int, device: str = "cpu") -> torch.Tensor:
    """Cosines and sines of positions 0 … ``positions - 1``.

    Returns:
        float32 ``[positions, head_dim]``: cosines in the first half of a row, sines in the second.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * rope.magnitude).to(device)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians a token of each rotated pair, fastest first: float32 ``[head_dim / 2]``."""
    plain = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.kind:
        case "default":
            return plain
        case "linear":
            return plain / rope.factor
        case "llama3":
            return _mix(plain, _kept_by_llama3(rope, plain), rope.factor)
        case "yarn":
            return _mix(plain, _kept_by_yarn(rope, head_dim), rope.factor)


def _mix(plain: torch.Tensor, kept: torch.Tensor, factor: float) -> torch.Tensor:
    """Leave frequencies alone where ``kept`` is 1, divide them by ``factor`` where it is 0, blend between."""
    return kept * plain + (1 - kept) * plain / factor


def _kept_by_llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: from fully stretched to untouched as more turns fit into the original context."""
    turns = rope.original_context * plain / (2 * math.pi)
    return ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def _kept_by_yarn(rope: Rope, head_dim: int) -> torch.Tensor:
    """YaRN (Peng et al., 2023, section 3.2): a ramp over the dimensions between two numbers of turns."""

    def dimension(turns: float) -> float:
        """The (fractional) pair that makes so many turns within the original context."""
        return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    return 1 - ((pairs - first) / max(last - first, 1e-3)).clamp(0, 1)
