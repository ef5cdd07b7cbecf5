"""A scheduler under traffic that never ends, over an engine that computes nothing: does everyone's turn come?"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tpserve.api import Policy
from tpserve.messages import Generate, RankMessage, SamplingParams, Shutdown, StepOutput
from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.replies import LocalReplies
from tpserve.scheduler.round import Round, RoundSource
from tpserve.scheduler.scheduler import Budget, Scheduler
from tpserve.step import EngineLimits, Pending, Step
from tpserve.tokens import pack_ids

__all__ = ["CONTEXT", "LARGE_CONTEXT", "Ask", "NoEngine", "rounds_until_finished"]

CONTEXT, LARGE_CONTEXT = 480, 1 << 16
LIMITS = EngineLimits(pages=60, page_size=8, slots=8, max_context=CONTEXT, vocab_size=50, eos_ids=())
BUDGET = Budget(running=8, step_tokens=100)
LARGE = EngineLimits(pages=1024, page_size=64, slots=8, max_context=LARGE_CONTEXT, vocab_size=50, eos_ids=())
LARGE_BUDGET = Budget(running=8, step_tokens=4096)
"""What is there where the request in question would not fit otherwise."""
BACKLOG = 28
"""So many requests live at any time until the victim comes, and twice as many from then on."""
LEAD = 50
"""Rounds before the victim comes."""


class Ask(msgspec.Struct, frozen=True):
    """What a request asks for.

    Attributes:
        prompt: tokens of its prompt.
        output: tokens of its answer.
        shared: so many tokens, with which its prompt begins, are those of others too.
        priority: larger is more urgent.
    """

    prompt: int
    output: int
    shared: int = 0
    priority: int = 0


def rounds_until_finished(policy: Policy, draw: Callable[[], Ask], victim: Ask, most: int) -> int | None:
    """How many rounds pass until a request is finished that comes when many others do, while others keep coming.

    Args:
        policy: decides.
        draw: what each of the others asks for; up to CONTEXT tokens.
        victim: and the one in question; up to LARGE_CONTEXT.
        most: give up after so many rounds.

    Returns:
        The rounds; None if it is not finished by then.
    """
    traffic = _Traffic(draw, victim, most)
    replies = LocalReplies(traffic.note)
    fits = victim.prompt + victim.output <= LIMITS.max_context
    limits, budget = (LIMITS, BUDGET) if fits else (LARGE, LARGE_BUDGET)
    Scheduler(traffic, replies, NoEngine(limits), policy, DecisionLog(0), budget).run()
    return traffic.waited


class _Traffic(RoundSource):
    """Sends a new request whenever one has finished."""

    def __init__(self, draw: Callable[[], Ask], victim: Ask, most: int) -> None:
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
        if self._round == LEAD:
            self._victim_uid = self._sent
            messages.append(self._request(self._victim))
        while self._living < (BACKLOG if self._round < LEAD else 2 * BACKLOG):
            messages.append(self._request(self._draw()))
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

    def _request(self, ask: Ask) -> Generate:
        uid = self._sent
        self._sent += 1
        self._living += 1
        # No two prompts begin alike, but for what they share.
        own = [uid % 50, uid // 50 % 50, *[uid % 7] * ask.prompt]
        ids = pack_ids([*[7] * ask.shared, *own][: ask.prompt])
        params = SamplingParams(max_tokens=ask.output, seed=uid, ignore_eos=True)
        return Generate(uid, ids, params, priority=ask.priority)


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
