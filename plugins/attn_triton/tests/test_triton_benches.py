"""What the measuring programs say of mistakes and of themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from tpserve.api import NoOptions, Ops
from tpserve.ops.reference import TorchOps
from tpserve_attn_triton import bench, bench_ops
from tpserve_attn_triton.ops import TritonOps


@pytest.mark.parametrize("main", [bench.main, bench_ops.main])
@pytest.mark.parametrize(
    ("arguments", "gpu", "code", "says"),
    [
        (["--help"], False, 0, "package.module:Class"),
        ([], False, 2, "error: there is no CUDA device"),
        (["nowhere:Class"], True, 2, "error: nowhere:Class is not there: No module named 'nowhere'"),
        (["json:Class"], True, 2, "error: json:Class is not there: "),
        (["Class"], True, 2, "error: Class is not there: "),
    ],
)
def test_what_is_said_on_the_command_line(
    main: Callable[[], None],
    arguments: list[str],
    gpu: bool,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    said = capsys.readouterr()
    assert says in said.out + said.err


@pytest.mark.parametrize("rows", [1, 3])
def test_layers_are_the_same_whatever_computes_them(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(ops: Ops) -> object:
        numbers = torch.Generator().manual_seed(1)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=numbers).bfloat16()

        monkeypatch.setattr(bench_ops, "random", random)
        monkeypatch.setattr(torch, "rand", lambda *size, device: random(*size).float())
        sizes = (4 * 128, 64), (64, 2 * 128), (2 * 96, 64), (64, 96)
        weights = [[random(*size) / 9 for size in sizes] for _ in range(2)]
        return bench_ops.make_layers(ops, weights, random(rows, 64), kv_heads=1)()

    torch.testing.assert_close(drawn(TritonOps(NoOptions())), drawn(TorchOps(NoOptions())), rtol=0.05, atol=0.05)


def test_weights_are_bound_as_in_a_model() -> None:
    ops = TritonOps(NoOptions())
    found = [bench_ops.binder(ops, name) for name in ("8B gate_up", "8B head", "8B down")]
    assert found == [ops.gated_linear, ops.linear, ops.linear_in_parts]
