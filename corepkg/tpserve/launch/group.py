"""The other ranks of an offline engine, started by the process that is rank 0 itself."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

from tpserve.errors import LaunchError, TpserveError
from tpserve.launch.layout import Layout
from tpserve.launch.plan import Plan, rank_start
from tpserve.launch.rundir import RunDir
from tpserve.launch.trouble import SETTLE_SECONDS, Trouble, find_cause, trouble_of
from tpserve.launch.watch import Watch
from tpserve.scheduler.digest import dump_path, report

__all__ = ["RankGroup"]

LEAVE_SECONDS = 1.0
"""How long followers may take to leave their decisions."""


class RankGroup:
    """Ranks 1 … n - 1 of an engine, and the run directory where they meet rank 0.

    Make it before rank 0 is composed, for ranks wait for each other; when rank 0 is ready, so are they. An engine of
    one rank may have a group too, which starts no process. A thread watches the followers.

    Args:
        plan: what was decided; ``plan.config.tp`` is n.
        on_failure: called once, from the thread, when a follower has failed or ended before :meth:`close`: with the
            follower's own error, and never with what the loss of a peer made of it if the cause can be told.
        leave_decisions: writes the last decisions of rank 0 to a file, to be compared with the followers'; called from
            the thread before ``on_failure``.

    Attributes:
        layout: where the ranks meet.
    """

    def __init__(
        self, plan: Plan, on_failure: Callable[[TpserveError], None], leave_decisions: Callable[[Path], None]
    ) -> None:
        self._on_failure = on_failure
        self._leave_decisions = leave_decisions
        self._run_dir = RunDir.create()
        self._watch = Watch()
        self._closing = False
        self._failed = Event()
        self._failure: TpserveError | None = None
        self.layout = Layout(self._run_dir.path)
        try:
            self.layout.create()
            self._children = [
                self._watch.start(rank_start(plan.post(self.layout, i))) for i in range(1, plan.config.tp)
            ]
        except BaseException:
            self._watch.close()
            self._run_dir.remove()
            raise
        self._thread = Thread(target=self._run, name="tpserve-followers", daemon=True)
        self._thread.start()

    def failure(self, patience: float = 2 * SETTLE_SECONDS + LEAVE_SECONDS) -> TpserveError | None:
        """A follower's failure, if one shows within ``patience`` seconds; when rank 0 fails, it may be the cause."""
        self._failed.wait(patience if self._children else 0.0)
        return self._failure

    def close(self, patience: float = 5.0) -> None:
        """Wait until the followers have left, which they do after a Shutdown, and kill those that have not.

        May be called twice.

        Args:
            patience: seconds to wait; 0 kills at once.
        """
        self._closing = True
        self._thread.join(patience)
        for child in self._children:
            child.signal(signal.SIGKILL)
        self._thread.join()
        self._watch.close()
        self._run_dir.remove()

    def _run(self) -> None:
        """Follow the followers until none is left."""
        while self._watch.children:
            happening = self._watch.next(math.inf)
            trouble = trouble_of(happening) if happening else None
            if trouble and not self._closing and not self._failed.is_set():
                self._fail(self._settle(trouble))

    def _settle(self, sign: Trouble) -> Trouble:
        troubles = [sign]
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._watch.children and (happening := self._watch.next(deadline)) is not None:
            troubles += [trouble] if (trouble := trouble_of(happening)) else []
        return find_cause(troubles)

    def _fail(self, cause: Trouble) -> None:
        failure = cause.failure
        if failure is not None and failure.is_user_error:
            self._failure = LaunchError(failure.error, failure.hint)
        else:
            self._failure = TpserveError("\n".join([cause.report, *self._differences()]))
        self._failed.set()
        self._on_failure(self._failure)

    def _differences(self) -> list[str]:
        """Where the ranks decided otherwise than rank 0, if they did. The followers end, and leave their decisions."""
        directory = self.layout.directory
        self._watch.end(list(self._watch.children), LEAVE_SECONDS)
        self._leave_decisions(dump_path(directory, 0))
        return report(directory)
