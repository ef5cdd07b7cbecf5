"""The supervisor: owns every process of a server, sees each death at once, and keeps the server up or takes it down.

The api process keeps the HTTP socket. The tokenizers, ranks and detokenizers are the *group*: they come up together,
and when one of them dies all of them go and the next generation starts. Meanwhile the api process answers 503 and
keeps what is in flight, to have the next generation finish it.
"""

from __future__ import annotations

import itertools
import logging
import math
import signal
import time
from contextlib import closing
from pathlib import Path
from typing import NoReturn, Protocol

import msgspec

from tpserve.errors import LaunchError
from tpserve.frontend.control import DownEvent, ServeEvent, StopEvent
from tpserve.launch.layout import Layout
from tpserve.launch.process import Child, Start
from tpserve.launch.protocol import Alive, Progress, Ready, Serving, Status, Stuck
from tpserve.launch.trouble import SETTLE_SECONDS, Trouble, find_cause, trouble_of
from tpserve.launch.vigil import Vigil
from tpserve.launch.watch import Exited, Happening, Said, Signalled, Watch
from tpserve.scheduler import digest
from tpserve.step import EngineLimits

__all__ = ["Cast", "Display", "Patience", "Supervisor"]

logger = logging.getLogger(__name__)


class Cast(Protocol):
    """Who belongs to a server."""

    def api(self) -> Start:
        """The process that serves HTTP."""

    def group(self, layout: Layout) -> list[Start]:
        """All others, meeting in ``layout``."""


class Display(Protocol):
    """Where a person sees what happens."""

    def progress(self, progress: Progress) -> None:
        """Rank 0 has loaded more."""

    def ready(self, limits: EngineLimits, seconds: float) -> None:
        """Clients are served, ``seconds`` after the processes were started."""

    def close(self) -> None:
        """Leave the screen to the log; more may be shown later."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long, and how often; times in seconds.

    Attributes:
        startup: until the server must serve.
        drain: what a stopping server gives running requests.
        grace: between asking a process to end and killing it.
        leave: what all processes have for leaving once requests are drained.
        restarts: how often a dead group is started again before the server gives up.
        backoff: before the first restart; doubles with each, up to ``longest_backoff``.
        longest_backoff: between restarts.
        watchdog: how long a process that serves may leave pings unanswered.
        stable: a group that has served for so long makes earlier failures forgotten.
    """

    startup: float = 600.0
    drain: float = 5.0
    grace: float = 2.0
    leave: float = 12.0
    restarts: int = 3
    backoff: float = 0.5
    longest_backoff: float = 10.0
    watchdog: float = 30.0
    stable: float = 300.0


class Stopped(Exception):
    """A signal asks the server to stop."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum.name)
        self.signum = signum


class Supervisor:
    """Runs one server.

    Args:
        cast: who belongs to it.
        run_dir: its run directory.
        patience: how long, and how often.
        display: where a person sees what happens.
    """

    def __init__(self, cast: Cast, run_dir: Path, patience: Patience, display: Display) -> None:
        self._cast = cast
        self._run_dir = run_dir
        self._patience = patience
        self._display = display
        self._watch = Watch()
        self._api: Child | None = None
        self._group: list[Child] = []
        self._has_served = False
        self._is_interrupted = False  # requests may wait for the next generation

    def run(self) -> int:
        """Serve until a signal comes or nothing helps any more. Afterwards no process is left.

        Returns:
            The exit code: 0 after a stop in good order, 128 + the signal's number after an abrupt one, 1 otherwise.

        Raises:
            UserError: the server could not be started, and the person who tried can mend it.
        """
        with closing(self._watch), self._watch.signals(*_signals()):
            try:
                return self._run()
            except Stopped as stop:
                logger.info("stopped by %s", stop.signum.name)
                return 128 + stop.signum
            finally:
                if self._is_interrupted:
                    self._dismiss(StopEvent())
                self._watch.end(list(self._watch.children), grace=0.0)

    def _run(self) -> int:
        failures = 0
        for generation in itertools.count(1):
            layout = Layout(self._run_dir, generation)
            serving_since = math.inf
            try:
                self._bring_up(layout)
                serving_since = time.monotonic()
                self._serve(generation)
            except Stopped:
                if serving_since == math.inf:
                    raise
                return self._stop()
            except Trouble as sign:
                trouble = self._settle(sign)
            self._take_down(layout, trouble)
            failures = 1 if time.monotonic() - serving_since > self._patience.stable else failures + 1
            if not self._has_served or failures > self._patience.restarts:
                return self._give_up(trouble)
            self._pause(failures)
        raise AssertionError("generations do not end")

    def _bring_up(self, layout: Layout) -> None:
        """Start whatever does not run, and wait until clients are served."""
        started = time.monotonic()
        deadline = started + self._patience.startup
        layout.create()
        if self._api is None or self._api.exit_code is not None:
            self._api = self._watch.start(self._cast.api())
        self._group = []
        for start in self._cast.group(layout):
            self._group.append(self._watch.start(start))
        limits = self._await_ready(deadline)
        for child in [*self._group, self._api]:
            child.send(ServeEvent(layout.generation, limits))
        self._await_serving(layout.generation, deadline)
        self._display.ready(limits, time.monotonic() - started)
        self._has_served = True
        self._is_interrupted = False

    def _await_ready(self, deadline: float) -> EngineLimits:
        waiting = list(self._group)
        limits: list[EngineLimits] = []
        while waiting:
            said = self._next(deadline, waiting)
            if isinstance(said.status, Progress):
                self._display.progress(said.status)
            elif isinstance(said.status, Ready):
                waiting.remove(said.child)
                limits += [said.status.limits] if said.status.limits else []
        if any(found != limits[0] for found in limits):
            raise Trouble(f"the ranks do not agree on what they have: {limits}")
        return limits[0]

    def _await_serving(self, generation: int, deadline: float) -> None:
        assert self._api is not None
        while True:
            status = self._next(deadline, [self._api]).status
            if isinstance(status, Serving) and status.generation == generation:
                return
            _check_not_stuck(status, generation)

    def _serve(self, generation: int) -> NoReturn:
        assert self._api is not None
        vigil = Vigil([*self._group, self._api], self._patience.watchdog)
        while True:
            happening = self._watch.next(vigil.due)
            if happening is None:
                self._give_up_on(vigil.ping())
                continue
            said = _heed(happening)
            if isinstance(said.status, Alive):
                vigil.heard(said.child)
            _check_not_stuck(said.status, generation)

    def _give_up_on(self, silent: Child | None) -> None:
        if silent is not None:
            self._watch.end([silent], grace=0.0)
            raise Trouble(f"{silent.name} has not answered for {self._patience.watchdog:g} s", None, 0)

    def _next(self, deadline: float, waiting: list[Child]) -> Said:
        """What a child says next.

        Raises:
            Stopped: a signal came.
            Trouble: a process failed or ended, or the deadline has passed and ``waiting`` have not said what they must.
        """
        happening = self._watch.next(deadline)
        if happening is None:
            names = ", ".join(child.name for child in waiting)
            raise Trouble(f"not ready within {self._patience.startup:g} s: {names}")
        return _heed(happening)

    def _settle(self, sign: Trouble) -> Trouble:
        """Tell clients, then look for a moment whether something else went wrong first."""
        assert self._api is not None
        self._is_interrupted = self._has_served
        self._api.send(DownEvent(sign.headline))
        self._display.close()
        troubles = [sign]
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._watch.children and (happening := self._watch.next(deadline)) is not None:
            if isinstance(happening, Signalled):
                raise Stopped(happening.signum)
            troubles += [trouble] if (trouble := trouble_of(happening)) else []
        return find_cause(troubles)

    def _take_down(self, layout: Layout, trouble: Trouble) -> None:
        self._watch.end(self._group, self._patience.grace)
        if self._has_served or not trouble.is_user_error:
            logger.error("%s", trouble.report)
        for difference in digest.report(layout.directory):
            logger.error("%s", difference)
        layout.remove()

    def _give_up(self, trouble: Trouble) -> int:
        if trouble.failure is not None and trouble.is_user_error and not self._has_served:
            raise LaunchError(trouble.failure.error, trouble.failure.hint)
        if self._has_served:
            logger.error("giving up after %d restarts", self._patience.restarts)
        return 1

    def _dismiss(self, last: StopEvent | DownEvent) -> None:
        """Let the api process tell those who wait that nobody will answer. A signal cuts that short."""
        assert self._api is not None
        self._api.send(last)
        deadline = time.monotonic() + self._patience.grace
        while self._api.exit_code is None:
            happening = self._watch.next(deadline)
            if happening is None or isinstance(happening, Signalled):
                return

    def _pause(self, failures: int) -> None:
        seconds = min(self._patience.backoff * 2 ** (failures - 1), self._patience.longest_backoff)
        logger.warning("starting again in %g s (%d of %d)", seconds, failures, self._patience.restarts)
        deadline = time.monotonic() + seconds
        while (happening := self._watch.next(deadline)) is not None:
            if isinstance(happening, Signalled):
                raise Stopped(happening.signum)

    def _stop(self) -> int:
        """Let the api process drain; Shutdown then goes through all others, and each leaves by itself.

        Raises:
            Stopped: a second signal came: no more waiting. A hangup is none: service managers send it after the first.
        """
        assert self._api is not None
        logger.info("stopping; running requests have %g s (once more to stop at once)", self._patience.drain)
        self._api.send(StopEvent())
        deadline = time.monotonic() + self._patience.drain + self._patience.leave
        while self._watch.children:
            happening = self._watch.next(deadline)
            if isinstance(happening, Signalled) and happening.signum is not signal.SIGHUP:
                raise Stopped(happening.signum)
            if isinstance(happening, (Said, Signalled)) or _left_in_order(happening):
                continue
            trouble = trouble_of(happening) if happening else Trouble(f"did not leave: {self._names()}", None, 2)
            assert trouble is not None
            if trouble.weight < 2:
                logger.error("%s", trouble.summary)
                self._dismiss(DownEvent(trouble.headline))
                return 1
            logger.warning("%s", trouble.summary)
            if happening is None:
                break
        if self._api.exit_code != 0:
            return 1
        # Whoever is left computes a long step, for nobody: when the api process leaves, all clients have been told.
        logger.info("stopped")
        return 0

    def _names(self) -> str:
        return ", ".join(child.name for child in self._watch.children)


def _signals() -> list[signal.Signals]:
    """What stops a server: not a hangup under nohup."""
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def _heed(happening: Happening) -> Said:
    """What a child says, unless something else has happened: that is raised as Stopped or Trouble."""
    if isinstance(happening, Signalled):
        raise Stopped(happening.signum)
    trouble = trouble_of(happening)
    if trouble is not None:
        raise trouble
    assert isinstance(happening, Said)
    return happening


def _check_not_stuck(status: Status, generation: int) -> None:
    """Raise what the api process says of its links, unless it speaks of a generation that is gone."""
    if isinstance(status, Stuck) and status.generation == generation:
        raise Trouble(status.reason, None, 2)


def _left_in_order(happening: Happening | None) -> bool:
    return isinstance(happening, Exited) and happening.child.exit_code == 0
