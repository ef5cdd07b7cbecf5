"""Deciding again what was recorded, without a model: the recorded tokens stand for those that an engine would draw."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from tpserve.api.policy import Policy
from tpserve.errors import Closed, RankError
from tpserve.scheduler.digest import DecisionLog, RoundDecisions, first_decision
from tpserve.scheduler.recording import RecordedRound, Recording
from tpserve.scheduler.replies import NullReplies
from tpserve.scheduler.round import Round, RoundSource
from tpserve.scheduler.scheduler import Scheduler
from tpserve.step import EngineLimits, Pending, Step

__all__ = ["Replayed", "replay"]


class Replayed(msgspec.Struct, frozen=True):
    """What came of it.

    Attributes:
        rounds: how many were decided as they had been.
        requests: of how many requests something was decided in them.
        tokens: how many tokens were drawn in them.
        difference: the first round that was decided otherwise and how, in one line; empty if there is none.
    """

    rounds: int
    requests: int
    tokens: int
    difference: str


def replay(recording: Recording, policy: Policy) -> Replayed:
    """Decide a recording's rounds anew, up to the first in which something differs.

    Args:
        recording: not read yet.
        policy: decides.

    Raises:
        RecordingError: it is damaged, or has no rounds.
    """
    header = recording.header
    log = DecisionLog(0)
    tape = _Tape(recording.rounds(), log)
    engine = _Engine(tape, header.limits)
    scheduler = Scheduler(
        tape, NullReplies(), engine, policy, log, header.budget, header.tokenizers, observe=tape.compare
    )
    difference = ""
    try:
        while not tape.difference and scheduler.serve_round():
            pass
        difference = tape.difference or tape.left_over()
    except Closed:
        difference = tape.difference
    except RankError as error:
        difference = f"the replay stops: {error}"
    return Replayed(tape.rounds, len(tape.uids), tape.tokens, difference)


class _Tape(RoundSource):
    """Gives the recorded messages out, and holds decisions to the recorded ones.

    Attributes:
        current: the round that was given out last; None behind the last.
        rounds, tokens, uids: what has been compared and was the same.
        difference: what was not.
    """

    def __init__(self, recorded: Iterator[RecordedRound], log: DecisionLog) -> None:
        self.current: RecordedRound | None = None
        self.rounds = 0
        self.tokens = 0
        self.uids: set[int] = set()
        self.difference = ""
        self._recorded = recorded
        self._log = log
        self._to_compare: deque[RecordedRound] = deque()
        self._number = 0

    def receive(self, block: bool) -> Round:
        """The next round; behind the last an empty one, in which what is under way is finished."""
        if self._number and self.current is None:
            raise Closed("the recording is over")
        self.current = next(self._recorded, None)
        number, self._number = self._number, self._number + 1
        if self.current is None:
            return Round(number, [])
        self._to_compare.append(self.current)
        return Round(number, [*self.current.messages])

    def close(self) -> None:
        """There is nothing to close."""

    def left_over(self) -> str:
        """What is recorded behind the end, in one line; empty if that is nothing."""
        found = next(self._recorded, None)
        return f"round {found.number}: it is recorded, and the replay has ended before" if found else ""

    def compare(self, arrived: Round, decisions: RoundDecisions) -> None:
        """Look at what was decided in a round."""
        if not self._to_compare or self.difference:
            return
        recorded = self._to_compare.popleft()
        found = first_decision(recorded.decisions, decisions)
        if found is not None:
            what, (was, now) = found
            self.difference = f"round {recorded.number}: {what} differs: recorded is {was}, replayed {now}"
        elif recorded.digest != self._log.latest[1]:
            self.difference = f"round {recorded.number}: the digest differs, and no decision"
        else:
            self.rounds += 1
            self.tokens += sum(token >= 0 for token in decisions.tokens)
            self.uids.update(decisions.uids)


class _Engine:
    """Draws the recorded tokens."""

    def __init__(self, tape: _Tape, limits: EngineLimits) -> None:
        self.limits = limits
        self._tape = tape

    def launch(self, step: Step) -> Pending:
        """The tokens of the round that was given out last; zeros where a batch has become longer."""
        batch = len(step.sequences)
        recorded = self._tape.current.decisions.tokens[-batch:] if self._tape.current else []
        tokens = [*recorded, *[0] * (batch - len(recorded))]
        return _Drawn([token for token, sequence in zip(tokens, step.sequences, strict=True) if sequence.sample])

    def close(self) -> None:
        """There is nothing to close."""


class _Drawn:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def tokens(self) -> list[int]:
        return self._tokens
