"""What the tests of the scheduler's parts share."""

from tpserve.messages import Generate, SamplingParams
from tpserve.scheduler.digest import DecisionLog, RoundDecisions
from tpserve.scheduler.queues import Request
from tpserve.testing.fake_engine import SMALL_LIMITS
from tpserve.tokens import pack_ids


def make(uid: int, prompt: int = 3, max_tokens: int = 5, outputs: int = 0, priority: int = 0, **params) -> Request:
    """A request of one token repeated, which came as number 100 + uid in round 7."""
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, **params)
    message = Generate(uid, pack_ids([9] * prompt), sampling, pack_ids([8] * outputs), priority)
    return Request.of(message, 100 + uid, 7, SMALL_LIMITS)


class Decisions(DecisionLog):
    """Keeps all that was decided."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rounds: list[RoundDecisions] = []

    @property
    def retracted(self) -> int:
        """How many times a request had to give its pages up."""
        return sum(len(decisions.retracted) for decisions in self.rounds)

    def fold(self, round: int, decisions: RoundDecisions) -> None:
        """Add a round."""
        self.rounds.append(decisions)
        super().fold(round, decisions)
