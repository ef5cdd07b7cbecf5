"""A supervisor over the children of supervised_roles, as a process that tests can signal.

Its argument is JSON: the patience, the members' names with what they do in which generation.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from tpserve.errors import UserError
from tpserve.launch.layout import Layout
from tpserve.launch.logging import set_up_logging
from tpserve.launch.process import Start
from tpserve.launch.protocol import ChildSpec, Progress
from tpserve.launch.rundir import RunDir
from tpserve.launch.supervisor import Patience, Supervisor
from tpserve.step import EngineLimits


class Scenario(msgspec.Struct):
    """What a test asks for; behaviour is keyed by member, then by generation (or ``*``), then by phase."""

    members: list[str]
    behaviour: dict[str, dict[str, dict[str, str]]]
    patience: Patience
    forked: list[str] = []


class FakeCast:
    def __init__(self, scenario: Scenario, run_dir: Path) -> None:
        self.scenario = scenario
        self.run_dir = run_dir

    def api(self) -> Start:
        return self._start("api", "api", {"run_dir": str(self.run_dir)})

    def group(self, layout: Layout) -> list[Start]:
        return [self._member(name, layout) for name in self.scenario.members]

    def _member(self, name: str, layout: Layout) -> Start:
        generations = self.scenario.behaviour.get(name, {})
        phases = generations.get(str(layout.generation), generations.get("*", {}))
        payload = {
            "directory": str(layout.directory),
            "limits": name.startswith("rank"),
            **{phase: phases.get(phase, "") for phase in ("loading", "serving", "leaving")},
        }
        return self._start(name, "member", payload)

    def _start(self, name: str, role: str, payload: dict[str, Any]) -> Start:
        spec = ChildSpec(
            name=name,
            place=name,
            main=f"supervised_roles:{role}",
            payload=msgspec.Raw(msgspec.json.encode(payload)),
        )
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        return Start(spec, {"PYTHONPATH": path}, is_forked=name in self.scenario.forked)


class Lines:
    """A display that prints a line for each thing shown."""

    def progress(self, progress: Progress) -> None:
        print("progress", progress.done, progress.total, flush=True)

    def ready(self, limits: EngineLimits, seconds: float) -> None:
        print("ready", limits.pages, flush=True)

    def close(self) -> None:
        pass


def main() -> int:
    scenario = msgspec.json.decode(sys.argv[1], type=Scenario)
    set_up_logging("launch", "info")
    with RunDir.create(Path(sys.argv[2])) as run_dir:
        print("run_dir", run_dir.path, flush=True)
        cast = FakeCast(scenario, run_dir.path)
        try:
            return Supervisor(cast, run_dir.path, scenario.patience, Lines()).run()
        except UserError as error:
            print(f"error: {error.message} / {error.hint}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
