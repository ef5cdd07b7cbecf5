"""What ``tpserve bench`` says of mistakes, before anything is started."""

from __future__ import annotations

import sys

import pytest

from tpserve.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--a zqm", "error: there is no transport plugin named 'zqm'\nhint: Available: "),
        ("--a inproc", "error: transport.inproc works inside one process only"),
        ("--a zmq,sync=glo", "error: there is no sync plugin named 'glo'"),
        ("--a zmq -o transport.bach=1", "error: transport.zmq has no option 'bach'"),
        ("--a zmq -o transport.batch", "error: -o transport.batch: no value"),
        ("--a zmq sync=gloo", "error: sync=gloo: only --matrix takes axes"),
        ("--matrix transport", "error: 'transport' is no axis of a matrix"),
        ("--a zmq --size 16X", "error: --size: expected bytes"),
        ("--a zmq --messages few", "error: --messages: expected numbers"),
        ("--a zmq --json nowhere/x.json", "error: nowhere/x.json: there is no folder"),
        ("--a zmq --arrival poisson --free-running", "error: --arrival and --free-running are two different paces"),
        ("--a zmq --arrival trace", "error: --arrival trace needs --trace FILE"),
        ("--a zmq --heartbeat 5 --watchdog 2", "error: heartbeat is 5 s and watchdog 2 s"),
        ("--a zmq --cpu-affinity 0;1;2", "error: cpu_affinity has 3 lists of cores for 2 ranks"),
        ("--messages 1", "error: there is nothing to compare"),
    ],
)
def test_a_mistake_ends_with_exit_code_2(
    arguments: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tpserve", "bench", "transport", *arguments.split()])

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
