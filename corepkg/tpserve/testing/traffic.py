"""A scheduler under traffic that never ends, over an engine that computes nothing: does everyone's turn come?"""

from __future__ import annotations

from collections.abc import Callable

from tpserve.api import Policy
from tpserve.messages import Generate, RankMessage, SamplingParams, Shutdown, StepOutput
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.replies import LocalReplies
from tpserve.scheduler.round import Round, RoundSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.step import EngineLimits, Pending, Step
from tpserve.tokens import pack_ids

__all__ = ["NoEngine", "rounds_until_finished"]

LIMITS = EngineLimits(pages=60, page_size=8, slots=8, max_context=480, vocab_size=50, eos_ids=())
BUDGET = Budget(running=8, step_tokens=100)
BACKLOG = 28
"""So many requests live at any time."""
LEAD = 50
"""Rounds before the victim comes."""


def rounds_until_finished(
    policy: Policy, draw: Callable[[], tuple[int, int]], victim: tuple[int, int], most: int
) -> int | None:
    """How many rounds pass until a request is finished that comes while others keep coming.

    Args:
        policy: decides.
        draw: prompt and output tokens of each of the others.
        victim: and of the one in question.
        most: give up after so many rounds.

    Returns:
        The rounds; None if it is not finished by then.
    """
    traffic = _Traffic(draw, victim, most)
    replies = LocalReplies(traffic.note)
    Scheduler(traffic, replies, NoEngine(LIMITS), policy, DecisionLog(0), BUDGET).run()
    return traffic.waited


class _Traffic(RoundSource):
    """Sends a new request whenever one has finished."""

    def __init__(self, draw: Callable[[], tuple[int, int]], victim: tuple[int, int], most: int) -> None:
        self.waited: int | None = None
        self._draw = draw
        self._victim = victim
        self._most = most
        self._round = -1
        self._sent = 0
        self._living = 0
        self._victim_uid = -1

    def receive(self, block: bool) -> Round:
        """The next round."""
        self._round += 1
        messages: list[RankMessage] = []
        while self._living < BACKLOG:
            messages.append(self._request(*self._draw()))
        if self._round == LEAD:
            self._victim_uid = self._sent
            messages.append(self._request(*self._victim))
        if self.waited is not None or self._round > LEAD + self._most:
            messages.append(Shutdown())
        return Round(self._round, messages)

    def note(self, output: StepOutput) -> None:
        """Count who finished."""
        finished = [uid for uid, reason in zip(output.uids, output.finished, strict=True) if reason == "length"]
        self._living -= len(finished)
        if self._victim_uid in finished:
            self.waited = self._round - LEAD

    def close(self) -> None:
        """There is nothing to close."""

    def _request(self, prompt: int, output: int) -> Generate:
        uid = self._sent
        self._sent += 1
        self._living += 1
        # No two prompts begin alike.
        ids = pack_ids([uid % 50, uid // 50 % 50, *[uid % 7] * (prompt - 2)][:prompt])
        return Generate(uid, ids, SamplingParams(max_tokens=output, seed=uid, ignore_eos=True))


class NoEngine:
    """Draws the token 0, at once.

    Args:
        limits: what it says it has.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits

    def launch(self, step: Step) -> Pending:
        """Compute nothing."""
        return _Drawn([0 for sequence in step.sequences if sequence.sample])

    def close(self) -> None:
        """There is nothing to close."""


class _Drawn:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def tokens(self) -> list[int]:
        return self._tokens
