"""Where a rank's outputs go: to the detokenizers, to a collector in the same process, or nowhere."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from tpserve.api.transport import PipeSender
from tpserve.envelope import Sealer
from tpserve.messages import Shutdown, StepMessage, StepOutput, encode

__all__ = ["LocalReplies", "NullReplies", "PipeReplies", "ReplySink"]

PRODUCER = 1000
"""Rank 0 in the envelopes of what it sends."""


class ReplySink(ABC):
    """Takes at most one output a round, in the order of the rounds."""

    @abstractmethod
    def send(self, output: StepOutput) -> None:
        """Pass an output on.

        Raises:
            TransportError: its reader is behind, or has gone.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Tell the readers that nothing more comes.

        Raises:
            TransportError: a reader is behind, or has gone.
        """


class NullReplies(ReplySink):
    """A follower's: only the leader replies."""

    def send(self, output: StepOutput) -> None:
        """Say nothing."""

    def shutdown(self) -> None:
        """Say nothing."""


class LocalReplies(ReplySink):
    """Hands outputs to a function in the same process, on the scheduler's thread.

    Args:
        deliver: gets each output; must neither block nor raise.
    """

    def __init__(self, deliver: Callable[[StepOutput], None]) -> None:
        self._deliver = deliver

    def send(self, output: StepOutput) -> None:
        """Deliver the output."""
        self._deliver(output)

    def shutdown(self) -> None:
        """Say nothing: who asked for the shutdown knows of it."""


class PipeReplies(ReplySink):
    """The leader's: request ``uid`` belongs to detokenizer ``uid % len(pipes)``, and what the pool does to the first.

    Args:
        pipes: one to each detokenizer, connected.
        patience: seconds that a detokenizer may be behind before that is an error.
    """

    def __init__(self, pipes: Sequence[PipeSender], patience: float) -> None:
        self._pipes = [(pipe, Sealer(PRODUCER)) for pipe in pipes]
        self._patience = patience

    def send(self, output: StepOutput) -> None:
        """Send each detokenizer its part of the output."""
        for index, part in enumerate(_split(output, len(self._pipes))):
            if part.uids or part.started or part.pool:
                self._send(index, part)

    def shutdown(self) -> None:
        """Send a Shutdown to every detokenizer."""
        for index in range(len(self._pipes)):
            self._send(index, Shutdown())

    def _send(self, index: int, message: StepMessage) -> None:
        pipe, sealer = self._pipes[index]
        pipe.send(sealer.seal(encode(message)), time.monotonic() + self._patience)


def _split(output: StepOutput, parts: int) -> list[StepOutput]:
    return [output] if parts == 1 else [_part(output, part, parts) for part in range(parts)]


def _part(output: StepOutput, part: int, parts: int) -> StepOutput:
    rows = [row for row, uid in enumerate(output.uids) if uid % parts == part]
    return StepOutput(
        round=output.round,
        uids=[output.uids[row] for row in rows],
        tokens=[output.tokens[row] for row in rows],
        finished=[output.finished[row] for row in rows],
        started=[entry for entry in output.started if entry.uid % parts == part],
        pool=None if part else output.pool,
    )
