"""Children for the supervisor's tests: they load nothing and misbehave as they are told."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec

from tpserve.errors import ModelError, PeerLost
from tpserve.frontend.control import DownEvent, ServeEvent, StopEvent
from tpserve.launch.child import Line
from tpserve.launch.protocol import Progress, Ready, Serving
from tpserve.step import EngineLimits

LIMITS = EngineLimits(pages=8, page_size=16, slots=4, max_context=128, vocab_size=100, eos_ids=(0,))


def api(line: Line, payload: msgspec.Raw) -> None:
    """Note every event in a file; on a stop, let the group leave through a file in its directory.

    While there is a file "draining", it leaves only when another dies.
    """
    run_dir = Path(msgspec.json.decode(payload)["run_dir"])
    directory = run_dir
    while True:
        event = line.receive()
        with (run_dir.parent / "events").open("a") as events:
            print(event, file=events)
        if isinstance(event, ServeEvent):
            directory = run_dir / f"g{event.generation}"
            line.report(Serving(event.generation))
        elif isinstance(event, StopEvent):
            if directory.exists():
                (directory / "leave").touch()
            if not (run_dir.parent / "draining").exists():
                return
        else:
            assert isinstance(event, DownEvent)
            if (run_dir.parent / "draining").exists():
                return


def member(line: Line, payload: msgspec.Raw) -> None:
    """One of the group; how it behaves is in the payload."""
    wanted: dict[str, Any] = msgspec.json.decode(payload)
    directory = Path(wanted["directory"])
    _behave(wanted["loading"], line, directory)
    line.report(Progress(1, 1))
    line.report(Ready(LIMITS if wanted["limits"] else None))
    while not (directory / "leave").exists():
        if (directory / "trigger").exists():
            _behave(wanted["serving"], line, directory)
        time.sleep(0.02)
    _behave(wanted["leaving"], line, directory)


def _behave(behaviour: str, line: Line, directory: Path) -> None:
    match behaviour:
        case "":
            pass
        case "crash":
            raise ZeroDivisionError("a crash on purpose")
        case "user-error":
            raise ModelError("the model is wrong", "Take another one")
        case "peer-lost":
            raise PeerLost("the peer has gone")
        case "killed":
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        case "stuck":
            assert line.pulse is not None
            line.pulse.work()
            time.sleep(3600)
        case "slow":
            assert line.pulse is not None
            line.pulse.work()
            time.sleep(0.05)
        case "hang":
            time.sleep(3600)
        case "hang-deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (directory / "deaf").touch()
            time.sleep(3600)
        case _:
            raise AssertionError(behaviour)
