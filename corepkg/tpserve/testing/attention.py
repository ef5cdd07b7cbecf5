"""The contract of the ``attention`` kind as tests: subclass :class:`AttentionContract` and name your implementation.

class TestMine(AttentionContract):
    capabilities = plugin.SPEC.capabilities

    def make(self, shape):
        return MyAttention(MyOptions(), shape)
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from tpserve.api.attention import Attention, AttentionBatch, AttentionShape
from tpserve.api.specs import AttentionCapabilities

__all__ = ["AttentionCase", "AttentionContract", "attention_oracle"]

_TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

_BATCHES: dict[str, list[tuple[int, int]]] = {
    "one decode": [(1, 37)],
    "decode": [(1, 1), (1, 64), (1, 16), (1, 130), (1, 17), (1, 65)],
    "prompt": [(50, 50)],
    "prompts": [(1, 1), (17, 17), (64, 64), (3, 3)],
    "chunk": [(7, 71)],
    "mixed": [(1, 90), (20, 20), (1, 3), (7, 135), (1, 16), (33, 97)],
    "long": [(600, 700)],
}
"""(new tokens, cached tokens) of each sequence."""

_LARGE: dict[str, list[tuple[int, int]]] = {
    "many decodes": [(1, 1 + number % 7) for number in range(40)],
    "many prompts": [(1 + number % 3, 1 + number % 7) if number % 7 > 1 else (1, 1) for number in range(40)],
    "far decode": [(1, 2500)],
    "far chunk": [(3, 2500), (1, 2)],
}
"""The same, of more sequences and of a longer context; they are tried in one small shape."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A random batch over a shuffled cache; cells that none of its tokens sees all hold one number."""

    shape: AttentionShape
    batch: AttentionBatch
    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    @staticmethod
    def random(
        shape: AttentionShape, lengths: list[tuple[int, int]], seed: int = 0, unseen: float = 1000.0
    ) -> AttentionCase:
        """Make a batch of sequences with the given (new tokens, cached tokens)."""
        generator = torch.Generator().manual_seed(seed)
        query_lens, kv_lens = [q for q, _ in lengths], [kv for _, kv in lengths]
        needed = [-(-kv // shape.page_size) for kv in kv_lens]
        pool = torch.randperm(sum(needed) + 3, generator=generator).tolist()
        slots = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)].tolist()
        table = torch.zeros(len(lengths) + 2, -(-shape.max_context // shape.page_size), dtype=torch.int32)
        cells = torch.full((2, len(pool), shape.page_size, shape.kv_heads, shape.head_dim), unseen)
        for slot, count, new, length in zip(slots, needed, query_lens, kv_lens, strict=True):
            pages = [pool.pop() for _ in range(count)]
            table[slot, :count] = torch.tensor(pages)
            drawn = torch.randn(2, length, shape.kv_heads, shape.head_dim, generator=generator)
            for position in range(_first_seen(shape, new, length), length):
                cells[:, pages[position // shape.page_size], position % shape.page_size] = drawn[:, position]
        query = torch.randn(sum(query_lens), shape.q_heads, shape.head_dim, generator=generator)
        dtype = getattr(torch, shape.dtype)
        batch = AttentionBatch(
            query_lens=query_lens,
            kv_lens=kv_lens,
            page_table=table.to(shape.device),
            slots=slots,
            slots_tensor=torch.tensor(slots, device=shape.device),
            kv_lens_tensor=torch.tensor(kv_lens, dtype=torch.int32, device=shape.device),
            query_starts=torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32, device=shape.device),
        )
        k_cache, v_cache = cells.to(shape.device, dtype).unbind(0)
        return AttentionCase(shape, batch, query.to(shape.device, dtype), k_cache, v_cache)


def attention_oracle(case: AttentionCase) -> torch.Tensor:
    """The definition, in float64 on the CPU, sequence by sequence: ``[tokens, q_heads, head_dim]``."""
    shape, batch = case.shape, case.batch
    group = shape.q_heads // shape.kv_heads
    query, k_cache, v_cache = (each.double().cpu() for each in (case.query, case.k_cache, case.v_cache))
    table = batch.page_table.cpu().long()
    rows = []
    for slot, new, end in zip(batch.slots, torch.split(query, batch.query_lens), batch.kv_lens, strict=True):
        pages, first = table[slot, : -(-end // shape.page_size)], _first_seen(shape, len(new), end)
        keys, values = (c[pages].flatten(0, 1)[first:end].repeat_interleave(group, dim=1) for c in (k_cache, v_cache))
        distance = torch.arange(end - len(new), end).unsqueeze(1) - torch.arange(first, end)
        seen = (distance >= 0) & (distance < (shape.sliding_window or end))
        scores = torch.einsum("qhd,thd->hqt", new, keys) * shape.scale
        if shape.soft_cap:
            scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
        rows.append(torch.einsum("hqt,thd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(dim=2), values))
    return torch.cat(rows)


def _first_seen(shape: AttentionShape, new: int, end: int) -> int:
    """The first position that the new tokens of a sequence see."""
    return max(0, end - new + 1 - shape.sliding_window) if shape.sliding_window else 0


class AttentionContract(ABC):
    """What every attention backend must compute.

    Attributes:
        capabilities: of the spec; cases outside them are not run.
        device: where to run.
    """

    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(sliding_window=True, soft_cap=True)
    device: ClassVar[str] = "cpu"

    @abstractmethod
    def make(self, shape: AttentionShape) -> Attention:
        """Construct the backend."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test over what the capabilities allow."""
        offered = self.capabilities
        axes: dict[str, list[Any]] = {
            "head_dim": [d for d in (64, 80, 96, 128, 256) if d in (offered.head_dims or (d,))],
            "page_size": [p for p in (1, 16, 64, 256) if p in (offered.page_sizes or (p,))],
            "dtype": [d for d in _TOLERANCE if d in (offered.dtypes or (d,))],
            "window": [1, 5, 48] if offered.sliding_window else [],
            "soft_cap": [0.5, 20.0] if offered.soft_cap else [],
            "heads": [(4, 4), (9, 3), (8, 1), (5, 1)],
            "unseen": [torch.nan, torch.inf],
            "lengths": list(_BATCHES),
            "large": list(_LARGE),
            "graph_heads": [h for h in ((6, 2, 64), (16, 8, 128)) if h[2] in (offered.head_dims or h)],
        }
        for name, values in axes.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, values, ids=str)

    def shape(self, **changes: Any) -> AttentionShape:
        """A small shape that the capabilities allow, with ``changes``."""
        offered = self.capabilities
        shape = AttentionShape(
            layers=1,
            q_heads=6,
            kv_heads=2,
            head_dim=(offered.head_dims or (64,))[0],
            page_size=16 if 16 in (offered.page_sizes or (16,)) else offered.page_sizes[0],
            max_context=1024,
            max_running=16,
            scale=0.1,
            dtype=(offered.dtypes or ("float32",))[0],
            device=self.device,
        )
        return msgspec.structs.replace(shape, **changes)

    def check(self, attention: Attention, case: AttentionCase) -> None:
        """Plan and run one batch, and compare."""
        attention.plan(case.batch)
        self.compare(attention.run(case.query, case.k_cache, case.v_cache), case)

    def compare(self, found: torch.Tensor, case: AttentionCase) -> None:
        """Compare what a backend found with the definition."""
        assert found.shape == case.query.shape
        assert found.dtype == case.query.dtype
        tolerance = _TOLERANCE[case.shape.dtype]
        torch.testing.assert_close(found.double().cpu(), attention_oracle(case), rtol=tolerance, atol=tolerance)

    def test_page_sizes(self, page_size: int, lengths: str) -> None:
        """Every kind of batch, at every page size."""
        shape = self.shape(page_size=page_size)
        self.check(self.make(shape), AttentionCase.random(shape, _BATCHES[lengths]))

    def test_head_dims(self, head_dim: int, lengths: str) -> None:
        """Every kind of batch, at every size of a head."""
        shape = self.shape(head_dim=head_dim, scale=head_dim**-0.5)
        self.check(self.make(shape), AttentionCase.random(shape, _BATCHES[lengths]))

    def test_grouped_heads(self, heads: tuple[int, int], lengths: str) -> None:
        """Every kind of batch, at several numbers of query heads to a KV head."""
        shape = self.shape(q_heads=heads[0], kv_heads=heads[1])
        self.check(self.make(shape), AttentionCase.random(shape, _BATCHES[lengths]))

    def test_dtypes(self, dtype: str, lengths: str) -> None:
        """Every kind of batch, in every dtype."""
        shape = self.shape(dtype=dtype)
        self.check(self.make(shape), AttentionCase.random(shape, _BATCHES[lengths]))

    def test_sliding_windows(self, window: int, lengths: str) -> None:
        """Every kind of batch, with windows shorter than a page, than a prompt and than a context."""
        shape = self.shape(sliding_window=window)
        self.check(self.make(shape), AttentionCase.random(shape, _BATCHES[lengths]))

    def test_soft_caps(self, soft_cap: float, lengths: str) -> None:
        """Every kind of batch, with scores bounded tightly and loosely."""
        shape = self.shape(soft_cap=soft_cap)
        self.check(self.make(shape), AttentionCase.random(shape, _BATCHES[lengths]))

    def test_what_a_sequence_does_not_see_does_not_matter(self, unseen: float, lengths: str) -> None:
        """Pages are used again as they are, and somebody's NaN or infinity may be left in them."""
        shape = self.shape()
        self.check(self.make(shape), AttentionCase.random(shape, _BATCHES[lengths], unseen=unseen))

    def test_what_a_window_excludes_does_not_matter(self, unseen: float, window: int, lengths: str) -> None:
        """Nor do cells of the sequence itself, before the first that one of its new tokens sees."""
        shape = self.shape(sliding_window=window)
        self.check(self.make(shape), AttentionCase.random(shape, _BATCHES[lengths], unseen=unseen))

    def test_large_batches(self, large: str) -> None:
        """Many sequences, and one of a long context."""
        shape = self.shape(q_heads=1, kv_heads=1, max_context=4096, max_running=64)
        self.check(self.make(shape), AttentionCase.random(shape, _LARGE[large]))

    def test_a_plan_serves_every_layer(self) -> None:
        """One plan, several caches."""
        shape = self.shape(layers=2)
        first, second = (AttentionCase.random(shape, _BATCHES["mixed"], seed) for seed in (0, 0))
        attention = self.make(shape)
        attention.plan(first.batch)
        other = AttentionCase(shape, first.batch, second.query + 1, second.k_cache - 1, second.v_cache * 2)
        for case in (first, other, first):
            found = attention.run(case.query, case.k_cache, case.v_cache)
            tolerance = 2 * _TOLERANCE[shape.dtype]
            torch.testing.assert_close(found.double().cpu(), attention_oracle(case), rtol=tolerance, atol=tolerance)

    def test_plans_follow_each_other(self) -> None:
        """A backend keeps nothing of an earlier plan."""
        shape = self.shape()
        attention = self.make(shape)
        for seed, lengths in enumerate((*_BATCHES, *reversed(_BATCHES))):
            self.check(attention, AttentionCase.random(shape, _BATCHES[lengths], seed))

    def test_the_halves_of_a_plan(self) -> None:
        """``replay`` and ``capture`` do for decode what ``plan`` does, with steps of any kind between them."""
        if not self.capabilities.cuda_graph:
            pytest.skip("has no CUDA graph")
        shape = self.shape()
        attention = self.make(shape)
        for seed, lengths in enumerate(("decode", "one decode", "mixed", "decode", "prompt", "one decode")):
            case = AttentionCase.random(shape, _BATCHES[lengths], seed)
            if not case.batch.is_decode:
                attention.plan(case.batch)
            else:
                attention.replay(case.batch)
                attention.capture(case.batch)
            self.compare(attention.run(case.query, case.k_cache, case.v_cache), case)

    def test_a_graph_is_right_for_whatever_its_tensors_say(self, dtype: str, graph_heads: tuple[int, int, int]) -> None:
        """Graphs of several sizes, replayed at other lengths, on other pages, in turn with ordinary steps."""
        if not self.capabilities.cuda_graph or not self.device.startswith("cuda"):
            pytest.skip("has no CUDA graph")
        q_heads, kv_heads, head_dim = graph_heads
        shape = self.shape(q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, max_context=4096)
        attention = self.make(shape)
        full = [[700, 4096, 2047, 5], [3000], [1, 2, 3, 4, 5, 6, 7, 8]]
        graphs = [_RecordedDecode(attention, shape, lengths, seed) for seed, lengths in enumerate(full)]
        ordinary = AttentionCase.random(shape, _BATCHES["mixed"])
        for share in (1, 9, 64, 500, 1000, 30):
            for graph, most in zip(graphs, full, strict=True):
                self.compare(graph.replay([max(1, length * share // 1000) for length in most]), graph.case)
            self.check(attention, ordinary)


class _RecordedDecode:
    """A CUDA graph of decode.

    Args:
        attention: the backend.
        shape: what it computes.
        lengths: the most cached tokens of each sequence.
        seed: of the cache.

    Attributes:
        case: the sequences, as the last replay saw them.
    """

    def __init__(self, attention: Attention, shape: AttentionShape, lengths: list[int], seed: int) -> None:
        self.case = AttentionCase.random(shape, [(1, length) for length in lengths], seed)
        self._attention = attention
        self._graph = torch.cuda.CUDAGraph()
        self._set([1] * len(lengths))
        attention.replay(self.case.batch)
        self._run()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph):
            self._found = self._run()

    def replay(self, lengths: list[int]) -> torch.Tensor:
        """What the graph computes for other lengths."""
        self._set(lengths)
        self._attention.replay(self.case.batch)
        self._graph.replay()
        return self._found

    def _set(self, lengths: list[int]) -> None:
        self.case.batch.kv_lens[:] = lengths
        self.case.batch.kv_lens_tensor.copy_(torch.tensor(lengths))

    def _run(self) -> torch.Tensor:
        self._attention.capture(self.case.batch)
        return self._attention.run(self.case.query, self.case.k_cache, self.case.v_cache)
