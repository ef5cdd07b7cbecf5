"""Whether a process's main loop still turns.

Its links tell: between two waits for messages it works. Nobody looks at a clock here; whoever asks does that.
"""

from __future__ import annotations

from tpserve.api import PipeReceiver
from tpserve.scheduler.round import Round, RoundSource

__all__ = ["Pulse", "PulsingReceiver", "PulsingSource"]


class Pulse:
    """The turns of a main loop; it waits until it first works."""

    def __init__(self) -> None:
        self._turns = 0
        self._turns_then = 0
        self._waits = True

    def wait(self) -> None:
        """The loop waits for work from now on."""
        self._waits = True

    def work(self) -> None:
        """It works from now on."""
        self._turns += 1
        self._waits = False

    def beats(self) -> bool:
        """Whether it waits, or has turned since this was last asked; from any one thread."""
        turns, waits = self._turns, self._waits
        moved = waits or turns != self._turns_then
        self._turns_then = turns
        return moved


class PulsingReceiver(PipeReceiver):
    """A receiver whose user waits in it, and works otherwise.

    Args:
        receiver: the one to use.
        pulse: of the user.
    """

    def __init__(self, receiver: PipeReceiver, pulse: Pulse) -> None:
        self._receiver = receiver
        self._pulse = pulse

    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        """As the receiver."""
        self._pulse.wait()
        try:
            return self._receiver.recv_many(max_frames, max_bytes, deadline)
        finally:
            self._pulse.work()

    def close(self) -> None:
        """As the receiver."""
        self._receiver.close()


class PulsingSource(RoundSource):
    """A source of rounds whose rank waits in it, and works otherwise.

    Args:
        source: the one to use.
        pulse: of the rank.
    """

    def __init__(self, source: RoundSource, pulse: Pulse) -> None:
        self._source = source
        self._pulse = pulse

    def receive(self, block: bool) -> Round:
        """As the source."""
        self._pulse.wait()
        try:
            return self._source.receive(block)
        finally:
            self._pulse.work()

    def close(self) -> None:
        """As the source."""
        self._source.close()
