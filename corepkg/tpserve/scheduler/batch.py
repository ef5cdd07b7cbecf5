"""One round's decisions as they are made, and the check that a plan may be carried out."""

from __future__ import annotations

from collections.abc import Collection

from tpserve.api.policy import Limits, Plan
from tpserve.messages import FinishReason, Started, StepOutput
from tpserve.scheduler.digest import RoundDecisions
from tpserve.scheduler.queues import Queues, Request
from tpserve.step import PageWrite, Sequence, SlotParams, Step, TokenWrite

__all__ = ["NO_TOKEN", "Batch", "breach"]

NO_TOKEN = -1


class Batch:
    """What one round decides: who ends without being computed, and what is computed of whom.

    Args:
        round: the round's number.

    Attributes:
        requests: those of which something is computed, in batch order.
    """

    def __init__(self, round: int) -> None:
        self.round = round
        self.requests: list[Request] = []
        self._ended: list[int] = []
        self._reasons: list[FinishReason | None] = []
        self._started: list[Started] = []
        self._sequences: list[Sequence] = []
        self._given: list[list[int]] = []
        self._tokens: list[TokenWrite] = []
        self._pages: list[PageWrite] = []
        self._params: list[SlotParams] = []
        self._draws_all = True

    def end(self, uid: int, reason: FinishReason) -> None:
        """Let a request end without a token."""
        self._ended.append(uid)
        self._reasons.append(reason)

    def start(self, request: Request) -> None:
        """Fill the row of the engine's tables that a request was just given."""
        slot, params = request.slot, request.params
        assert params.seed is not None, f"request {request.uid} came without a seed"
        output_ids = request.tokens[request.prompt_tokens :].tolist()
        self._started.append(Started(request.uid, request.prompt_tokens, cached_tokens=0, output_ids=output_ids))
        self._tokens.append(TokenWrite(slot, 0, request.tokens[:]))
        self._pages.append(PageWrite(slot, 0, request.pages))
        self._params.append(SlotParams(slot, params.temperature, params.top_k, params.top_p, params.min_p, params.seed))

    def prefill(self, request: Request, tokens: int, given: list[int]) -> None:
        """Compute the next ``tokens`` known tokens of a request, which has just got the pages ``given``."""
        start, end = request.length, request.length + tokens
        draws = end == request.known
        self._draws_all &= draws
        self._sequences.append(Sequence(request.slot, start, end, draws))
        self._given.append(given)
        self.requests.append(request)
        request.length = end

    def decode(self, requests: Collection[Request]) -> None:
        """Compute the newest token of each request."""
        add = self._sequences.append
        for request in requests:
            start = request.length
            request.length = end = start + 1
            add(Sequence(request.slot, start, end, True))
        self._given += [[]] * len(requests)
        self.requests += requests

    def step(self) -> Step | None:
        """What the engine has to do; None if nothing is computed."""
        if not self._sequences:
            return None
        return Step(self._sequences, self._tokens, self._pages, self._params)

    def align(self, drawn: list[int]) -> list[int]:
        """Lay the drawn tokens beside ``requests``: NO_TOKEN where none was drawn."""
        if self._draws_all:
            return drawn
        tokens = iter(drawn)
        return [next(tokens) if sequence.sample else NO_TOKEN for sequence in self._sequences]

    def decisions(self, tokens: list[int], finished: list[FinishReason | None]) -> RoundDecisions:
        """All that was decided, given the token of each of ``requests`` and why it finished."""
        ended = len(self._ended)
        return RoundDecisions(
            uids=[*self._ended, *[request.uid for request in self.requests]],
            pages=[*[[]] * ended, *self._given],
            lengths=[*[0] * ended, *[sequence.end for sequence in self._sequences]],
            tokens=[*[NO_TOKEN] * ended, *tokens],
            finished=[*self._reasons, *finished],
        )

    def output(self, decisions: RoundDecisions) -> StepOutput | None:
        """What clients hear of those decisions; None if that is nothing."""
        uids, tokens, finished = decisions.uids, decisions.tokens, decisions.finished
        if not self._draws_all:
            told = [row for row, token in enumerate(tokens) if token != NO_TOKEN or finished[row]]
            uids, tokens, finished = [uids[r] for r in told], [tokens[r] for r in told], [finished[r] for r in told]
        if not uids and not self._started:
            return None
        return StepOutput(self.round, uids, tokens, finished, self._started)


def breach(plan: Plan, queues: Queues, limits: Limits) -> tuple[str, str] | None:
    """Where a plan cannot be carried out: what was expected, and what was found; None for a good plan."""
    seen: set[int] = set()
    rows, pages, prompts = limits.running - len(queues.running), limits.free_pages, 0
    for prefill in plan.prefill:
        request = queues.get(prefill.uid)
        if request is None or prefill.uid in seen:
            return "living requests, each once", f"request {prefill.uid}"
        if not 0 < prefill.tokens <= request.pending:
            return f"1 to {request.pending} tokens of request {prefill.uid}", str(prefill.tokens)
        if prefill.uid in queues.waiting:
            rows -= 1
            pages -= limits.pages(request.reserve)
        prompts += prefill.tokens
        seen.add(prefill.uid)
    if rows < 0:
        return f"at most {limits.running} running requests", str(limits.running - rows)
    if pages < 0:
        return f"at most {limits.free_pages} pages", str(limits.free_pages - pages)
    decodes = len(queues.decoding) if plan.decode else 0
    alone = len(plan.prefill) == 1 and not decodes
    if prompts + decodes > limits.tokens and not alone:
        return f"at most {limits.tokens} tokens", str(prompts + decodes)
    if not prompts + decodes:
        return f"something to compute for {len(queues)} requests", "nothing"
    return None
