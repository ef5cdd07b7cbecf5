"""The ``attention`` kind: attention over a paged KV cache.

A backend is planned once a step and run once a layer. Query tokens of all sequences lie back to back; sequence ``i``
has ``query_lens[i]`` of them, the last of its ``kv_lens[i]`` cached tokens, and attention is causal.
The KV store happens before :meth:`Attention.run` (the ``ops`` kind does it), so the cache already holds the new tokens.

**The guarantee**: what a cell holds does not matter to a sequence none of whose new tokens sees it. Pages are used
again as they are, so such cells, in a sequence's own pages too, may hold anything, NaN and infinity included: to weigh
them with 0 is not enough.

A CUDA graph can hold the decode of a backend whose capability ``cuda_graph`` says so. :meth:`Attention.plan` comes in
two halves there: :meth:`Attention.replay`, what the host does before each replay, and :meth:`Attention.capture`, which
is recorded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tpserve.api.specs import Options

if TYPE_CHECKING:
    import torch

__all__ = ["Attention", "AttentionBatch", "AttentionShape"]


class AttentionShape(msgspec.Struct, frozen=True):
    """What does not change while a rank lives.

    Attributes:
        layers: layers of this rank.
        q_heads: query heads of this rank.
        kv_heads: KV heads of this rank; divides ``q_heads``; query head h reads KV head h // (q_heads // kv_heads).
        head_dim: size of a head.
        page_size: tokens a page.
        max_context: the longest sequence.
        max_running: the most sequences in a batch.
        scale: factor on the scores, above 0, normally head_dim ** -0.5.
        dtype: name of the dtype of queries and cache: float32, float16 or bfloat16.
        device: the torch device, as a string.
        sliding_window: how many tokens back a token sees, itself included; 0 for all.
        soft_cap: a score s, scaled, counts as soft_cap * tanh(s / soft_cap); 0 to leave it as it is.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    max_context: int
    max_running: int
    scale: float
    dtype: str
    device: str
    sliding_window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """The sequences of one step, in batch order.

    Attributes:
        query_lens: new tokens of each sequence, on the host.
        kv_lens: cached tokens of each sequence, new ones included, on the host.
        page_table: int32 ``[slots, max_pages]`` on the device: row ``slots[i]`` lists sequence i's pages.
        slots: the row of each sequence, on the host.
        slots_tensor: the same, int64 ``[n]`` on the device.
        kv_lens_tensor: int32 ``[n]`` on the device.
        query_starts: int32 ``[n + 1]`` on the device, running sum of ``query_lens`` from 0.
    """

    query_lens: list[int]
    kv_lens: list[int]
    page_table: torch.Tensor
    slots: list[int]
    slots_tensor: torch.Tensor
    kv_lens_tensor: torch.Tensor
    query_starts: torch.Tensor

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one new token."""
        return all(n == 1 for n in self.query_lens)


class Attention(ABC):
    """A set of attention kernels, and the plan of the current step.

    Args:
        options: an instance of the spec's ``options`` struct.
        shape: what does not change while the rank lives.
    """

    def __init__(self, options: Options, shape: AttentionShape) -> None:
        self.options = options
        self.shape = shape

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare for one step; called once before the first layer."""

    def capture(self, batch: AttentionBatch) -> None:
        """Plan a decode batch inside a CUDA graph, in the place of :meth:`plan`; followed by a :meth:`run` a layer.

        Called only where the capability ``cuda_graph`` is stated: once or more to warm up, and then while the current
        stream is recorded, each time after :meth:`replay` for the same number of sequences. Of the batch, the number of
        sequences and the addresses of ``page_table``, ``slots_tensor``, ``kv_lens_tensor`` and ``query_starts`` (the
        running sum of ones) are those of every replay; all else may change.

        What is launched here and by the ``run`` calls is recorded; both wait for nothing and copy nothing from the
        host. **The guarantee**: a replay attends to what those four tensors say then, provided that :meth:`replay` was
        called before it. Graphs for several numbers of sequences are recorded in turn and replayed in any order, with
        steps of :meth:`plan` between them.

        The default is :meth:`plan`: enough where a plan of decode reads nothing but those tensors, on the device.
        """
        self.plan(batch)

    def replay(self, batch: AttentionBatch) -> None:  # noqa: B027 - by default there is nothing to do
        """Do what the host has to, before a replay of the graph recorded for as many sequences as ``batch`` has.

        Args:
            batch: as in :meth:`capture`, with the true ``kv_lens`` and ``slots`` of this step. The graph before may
                still be running, and the device may not have written ``kv_lens_tensor`` yet: lengths are read from the
                host's lists, and nothing waits.

        The default does nothing.
        """

    @abstractmethod
    def run(self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """Attend, for the planned batch.

        Args:
            query: ``[tokens, q_heads, head_dim]``; the numbers of a head lie side by side.
            k_cache: one layer's keys, contiguous ``[pages, page_size, kv_heads, head_dim]``.
            v_cache: one layer's values, of the same shape.

        Returns:
            ``[tokens, q_heads, head_dim]``, of the query's dtype.
        """
