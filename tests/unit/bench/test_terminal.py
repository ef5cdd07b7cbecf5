"""Tables in terminals of every width: figures are whole."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.text import Text

from tpserve.bench.terminal import Grid, report_console

HEADING = ["over zmq+shm", "p50 µs", "p99", "verdict"]
ROWS = [
    ["zmq+shm transport.batch=65536", "76,700", "1,234,567", ""],
    ["[nng]", "8.15", "–", Text("cannot tell (0.614 … 1.63)", style="dim")],
]


def shown(width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(Grid(HEADING, ROWS, figures=2))
    return out.getvalue()


def test_what_fits_is_a_table() -> None:
    assert [line.split() for line in shown(85).splitlines() if line.strip("─ ")] == [
        ["over", "zmq+shm", "p50", "µs", "p99", "verdict"],
        ["zmq+shm", "transport.batch=65536", "76,700", "1,234,567"],
        ["[nng]", "8.15", "–", "cannot", "tell", "(0.614", "…", "1.63)"],
    ]


@pytest.mark.parametrize("width", [60, 40, 24, 20])
def test_what_does_not_fit_is_lines_with_whole_figures(width: int) -> None:
    lines = shown(width).splitlines()
    words = " ".join(lines).split()

    assert max(map(len, lines)) <= width
    for row in ROWS:
        for cell in row[1:]:
            assert set(str(cell).split()) <= set(words)
    assert words.count("p50") == 2
    assert words.count("verdict") == 1


def test_a_file_gets_the_whole_width(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    wide = Grid(["arm", *map(str, range(40))], [["zmq", *["76,700"] * 40]], figures=40)
    report_console().print(wide)

    [row] = [line for line in capsys.readouterr().out.splitlines() if "zmq" in line]
    assert row.split() == ["zmq", *["76,700"] * 40]
