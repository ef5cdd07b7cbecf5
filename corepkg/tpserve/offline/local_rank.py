"""Rank 0 on a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

import msgspec

from tpserve.errors import Closed
from tpserve.messages import RankMessage, Shutdown, StepOutput
from tpserve.scheduler.replies import LocalReplies, ReplySink
from tpserve.step import EngineLimits

if TYPE_CHECKING:
    from tpserve.launch.rank import Rank

__all__ = ["LocalRank"]

Feed = Callable[[Sequence[RankMessage]], None]
"""Sends messages to a rank, from any thread."""


class _Ended(msgspec.Struct, frozen=True):
    error: BaseException | None


class LocalRank:
    """Rank 0 on a daemon thread, on which it is composed, run and closed.

    A thread of its own keeps the ranks of a group in touch while the caller does something else.
    """

    def __init__(self) -> None:
        self._said: SimpleQueue[EngineLimits | StepOutput | _Ended] = SimpleQueue()
        self._ended: _Ended | None = None
        self._is_ready = False
        self._feed: Feed | None = None
        self._thread: Thread | None = None
        self._rank: Rank | None = None

    def start(self, compose: Callable[[ReplySink], Rank], feed: Feed) -> None:
        """Start the thread.

        Args:
            compose: makes the rank, given where its replies go.
            feed: sends it messages.
        """
        self._feed = feed
        self._thread = Thread(target=self._live, args=(compose,), name="tpserve-rank0", daemon=True)
        self._thread.start()

    def wait_ready(self) -> EngineLimits:
        """Wait until the rank is composed; what its engine has.

        Raises:
            Exception: what composing it raised, or what :meth:`fail` was given.
        """
        said = self._next()
        assert isinstance(said, EngineLimits)
        self._is_ready = True
        return said

    def put(self, messages: Sequence[RankMessage]) -> None:
        """Send the rank messages; they are dropped if it has ended."""
        if self._feed and self._thread and self._thread.is_alive():
            self._feed(messages)

    def next(self) -> StepOutput:
        """Wait for its next output.

        Raises:
            Closed: after :meth:`close`.
            Exception: what ended it, or what :meth:`fail` was given.
        """
        said = self._next()
        assert isinstance(said, StepOutput)
        return said

    def fail(self, error: Exception) -> None:
        """Let whoever waits raise ``error``: the rank cannot go on. Any thread may call this."""
        self._said.put(_Ended(error))

    def leave_decisions(self, path: Path) -> None:
        """Write the last decisions of the rank to a file, if there are any. Any thread may call this."""
        if self._rank:
            self._rank.scheduler.dump(path)

    def close(self, patience: float) -> bool:
        """Shut the rank down; whether it let go of everything, in order, within ``patience`` seconds."""
        self.put([Shutdown()])
        if self._thread and self._is_ready:
            self._thread.join(patience)
            self._drain()
        return self._ended == _Ended(None)

    def _drain(self) -> None:
        """Drop what was said before the end, so that who asks afterwards hears of the end."""
        while self._ended is None:
            try:
                said = self._said.get_nowait()
            except Empty:
                return
            if isinstance(said, _Ended):
                self._ended = said

    def _next(self) -> EngineLimits | StepOutput:
        said = self._ended or self._said.get()
        if isinstance(said, _Ended):
            self._ended = said
            raise said.error or Closed("the engine has been shut down")
        return said

    def _live(self, compose: Callable[[ReplySink], Rank]) -> None:
        error: BaseException | None = None
        try:
            with compose(LocalReplies(self._said.put)) as rank:
                self._rank = rank
                self._said.put(rank.limits)
                rank.scheduler.run()
        except BaseException as raised:  # noqa: BLE001 - raised again by whoever waits for this thread
            error = raised
        self._said.put(_Ended(error))
