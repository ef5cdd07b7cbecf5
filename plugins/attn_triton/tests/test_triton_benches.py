"""What the measuring programs say of mistakes and of themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from tpserve_attn_triton import bench, bench_ops


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
