"""What FlashInfer is told of a batch; without FlashInfer, an imitation computes from it."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tpserve.api import AttentionShape, NoOptions
from tpserve.testing.attention import AttentionCase, AttentionContract, attention_oracle
from tpserve.testing.package import PackageContract
from tpserve_attn_flashinfer import attention as module
from tpserve_attn_flashinfer import plugin
from tpserve_attn_flashinfer.attention import FlashInferAttention
from tpserve_attn_flashinfer.layout import gather_pages, lay_out, parts_of, workspace_bytes
from tpserve_attn_flashinfer.plugin import probe, tpserve_attentions

SPEC = tpserve_attentions()[0]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TestPackage(PackageContract):
    plugin = "attention.flashinfer"


class TestFlashInfer(AttentionContract):
    capabilities = SPEC.capabilities
    device = DEVICE

    def make(self, shape: AttentionShape) -> FlashInferAttention:
        return FlashInferAttention(NoOptions(), shape)


SHAPE = TestFlashInfer().shape(max_running=8)


def test_pages_lie_in_one_array_sequence_by_sequence() -> None:
    packed = lay_out([1, 16, 17, 40], [3, 0, 2, 1], page_size=16, columns=5)
    starts, last_lens, bases = parts_of(packed)
    assert starts.tolist() == [0, 1, 2, 4, 7]
    assert last_lens.tolist() == [1, 16, 1, 8]
    assert bases.tolist() == [15, -1, 8, 1, 0]
    table = torch.arange(100, 120, dtype=torch.int32).view(4, 5)
    places = torch.arange(20, dtype=torch.int32)
    for count in (7, 20):
        pages = torch.full((count,), -1, dtype=torch.int32)
        gather_pages(packed, table, places[:count], pages)
        assert pages[:7].tolist() == [115, 100, 110, 111, 105, 106, 107]
        assert ((pages >= 100) & (pages < 120)).all()


def test_pages_of_one_token() -> None:
    starts, last_lens, _ = parts_of(lay_out([3, 1], [0, 1], page_size=1, columns=8))
    assert starts.tolist() == [0, 3, 4]
    assert last_lens.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"q_heads": 32, "kv_heads": 8, "max_running": 256}, 16 * (256 + 64)),
        ({"q_heads": 32, "kv_heads": 8, "max_running": 16}, 128 * 33),
        ({"q_heads": 32, "kv_heads": 1, "max_running": 300}, 128 * (300 + 75)),
    ],
)
def test_the_workspace_holds_every_row_of_every_part(changes: dict[str, int], rows: int) -> None:
    shape = msgspec.structs.replace(SHAPE, head_dim=128, **changes)
    needed = 4 * 32 * rows * (128 + 1)
    assert needed <= workspace_bytes(shape, processors=132) < needed + 8192


def test_a_plan_that_may_be_on_its_way_is_not_written_over() -> None:
    attention = FlashInferAttention(NoOptions(), SHAPE)
    case = AttentionCase.random(SHAPE, [(1, 20), (1, 30)])
    planned = []
    for _ in range(4):
        attention.replay(case.batch)
        attention.capture(case.batch)
        planned.append(attention._planned)
    assert planned[0] is planned[2] is not planned[1]
    assert planned[1] is planned[3]


def test_a_query_may_be_a_part_of_a_larger_tensor() -> None:
    case = AttentionCase.random(SHAPE, [(3, 9), (1, 7)])
    query = torch.cat([case.query + 1, case.query, case.query - 1], dim=1)[:, 6:12]
    attention = FlashInferAttention(NoOptions(), SHAPE)
    attention.plan(case.batch)
    found = attention.run(query, case.k_cache, case.v_cache)
    expected = attention_oracle(dataclasses.replace(case, query=query))
    torch.testing.assert_close(found.double().cpu(), expected, rtol=3e-2, atol=3e-2)


def test_compiling_is_said_before_and_after(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    built: list[bool] = []
    compiled = SimpleNamespace(
        is_aot=False, is_compiled=False, build_dir=Path("/cache/there"), build=lambda verbose: built.append(verbose)
    )
    monkeypatch.setattr(module, "gen_batch_prefill_module", lambda *key: compiled)
    with caplog.at_level("INFO"):
        module._compile(SHAPE, torch.bfloat16)
        compiled.is_compiled = True
        module._compile(SHAPE, torch.bfloat16)
    assert built == [False]
    begun, ended = caplog.messages
    assert begun.startswith("compiling FlashInfer's kernels for bfloat16 heads of 128")
    assert ended.endswith("kept in /cache")


class TestProbe:
    @pytest.fixture(autouse=True)
    def with_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugin, "no_cuda", lambda: None)

    def install(self, monkeypatch: pytest.MonkeyPatch, *, cached: bool, compiler: bool) -> None:
        def get_cuda_path() -> str:
            if not compiler:
                raise RuntimeError("Could not find nvcc")
            return "/usr/local/cuda"

        found: dict[str, dict[str, Any]] = {
            "flashinfer": {},
            "flashinfer.jit": {},
            "flashinfer.jit.cpp_ext": {"get_cuda_path": get_cuda_path},
            "flashinfer.jit.env": {"has_flashinfer_jit_cache": lambda: cached},
        }
        for name, content in found.items():
            imitation = ModuleType(name)
            vars(imitation).update(content)
            monkeypatch.setitem(sys.modules, name, imitation)

    def test_without_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugin, "no_cuda", lambda: "there is no CUDA device")
        assert probe() == "there is no CUDA device"

    def test_an_import_that_fails_is_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "flashinfer", None)
        reason = probe()
        assert reason is not None
        assert reason.startswith("importing flashinfer failed: ModuleNotFoundError: ")

    @pytest.mark.parametrize(("cached", "compiler"), [(True, True), (True, False), (False, True)])
    def test_kernels_are_compiled_here_or_came_compiled(
        self, monkeypatch: pytest.MonkeyPatch, cached: bool, compiler: bool
    ) -> None:
        self.install(monkeypatch, cached=cached, compiler=compiler)
        assert probe() is None

    def test_without_either(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.install(monkeypatch, cached=False, compiler=False)
        assert "no nvcc" in (probe() or "")
