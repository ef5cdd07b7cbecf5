"""The ``ops`` kind: the small fused steps of a decoder layer, the matrix products, and sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpserve.api.specs import Options

if TYPE_CHECKING:
    import torch


__all__ = ["Linear", "Ops", "SamplingBatch"]

Linear = Callable[["torch.Tensor"], "torch.Tensor"]
"""A matrix product with its weight (and bias) bound: ``[n, in] -> [n, out]``."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How to sample each row of a step's logits; all tensors ``[n]`` on the device.

    Attributes:
        temperature: float32; 0 takes the most likely token.
        top_k: int32; 0 keeps all.
        top_p: float32 in (0, 1]; 1 keeps all.
        min_p: float32 in [0, 1); 0 keeps all.
        seed: int64, the request's seed.
        position: int64, the absolute position of the token being drawn.
        all_greedy: on the host: every temperature is 0.
        any_filter: on the host: some row has a top_k, top_p or min_p that removes tokens.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    all_greedy: bool
    any_filter: bool


class Ops(ABC):
    """Fused steps of a layer.

    Args:
        options: an instance of the spec's ``options`` struct.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """Prepare a product with ``weight`` ``[out, in]``; called once at loading, where weights may be repacked."""

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """As :meth:`linear` for ``weight`` ``[2 * d, in]``, and then :meth:`silu_and_mul`: ``[n, in] -> [n, d]``.

        Override it where one kernel can do both.
        """
        linear = self.linear(weight, bias)
        return lambda x: self.silu_and_mul(linear(x))

    def linear_in_parts(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """As :meth:`linear`, for what goes to :meth:`add_rms_norm` or :meth:`rotate_and_store` of these ops alone.

        Override it where those can add up a product's parts: it may return any ``[parts, n, out]`` with that sum.
        """
        return self.linear(weight, bias)

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last dimension (Zhang & Sennrich, 2019), computed in float32."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(rms_norm(x + residual), x + residual)``; may overwrite both inputs.

        Args:
            x: ``[n, hidden]``, or what a product of :meth:`linear_in_parts` has returned.
            residual: ``[n, hidden]``.
        """

    @abstractmethod
    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache_slots: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor:
        """Normalise q and k per head where norms are given, rotate both, store k and v in the cache.

        The pairs rotated are (i, i + head_dim / 2) of each head (Su et al., 2021, in the half-split layout); norms and
        rotation are computed in float32.

        Args:
            qkv: ``[tokens, q_heads + 2 * kv_heads, head_dim]``: query heads, key heads, value heads; or with parts
                before the tokens, as a product of :meth:`linear_in_parts` has returned; may be overwritten.
            cos_sin: float32 ``[tokens, head_dim]``: for each token the cosines of its position in the first half of a
                row, the sines in the second.
            k_cache, v_cache: ``[pages, page_size, kv_heads, head_dim]``, contiguous.
            cache_slots: int64 ``[tokens]``, all different: page * page_size + offset.
            q_norm, k_norm: ``[head_dim]``; both or none.

        Returns:
            The rotated q, ``[tokens, q_heads, head_dim]``, of the dtype of ``qkv``; may share memory with it.
        """

    @abstractmethod
    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` for ``gate_up`` ``[n, 2 * d]``, gate in the first half: ``[n, d]``."""

    @abstractmethod
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Draw one token a row.

        A row with temperature 0 takes the smallest index among its largest logits. Any other row takes the argmax,
        over the tokens that top_k, then top_p, then min_p keep, of ``logit / temperature + g``, where ``g`` is
        Gumbel noise that depends on (seed, position, token id) alone (the Gumbel-max trick): neither batch mates
        nor rank nor the vocabulary's split can change it. :mod:`tpserve.ops.noise` defines the counter.

        Each filter is a threshold on the probabilities (of ``logit / temperature``), so equal ones stay or go together:
        top_k keeps those at least as likely as the k-th; top_p renormalises what is left and keeps those at least as
        likely as the token whose probability takes the sum of the larger ones to top_p; min_p keeps those at least
        min_p times as likely as the likeliest.

        Logits are finite, or -inf. What else a row has leaves open which of its tokens is drawn, but one is, and the
        other rows' draws stay as they are.

        Args:
            logits: ``[n, vocabulary]``, any float dtype; may be overwritten.

        Returns:
            int64 ``[n]``.
        """
