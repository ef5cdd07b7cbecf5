"""One round's decisions as they are made: who ends without being computed, and what is computed of whom."""

from __future__ import annotations

from collections.abc import Collection

from tpserve.messages import FinishReason, Started, StepOutput
from tpserve.scheduler.digest import RoundDecisions
from tpserve.scheduler.queues import Request
from tpserve.step import PageWrite, Sequence, SlotParams, Step, TokenWrite

__all__ = ["NO_TOKEN", "Batch"]

NO_TOKEN = -1
NOTHING: list[int] = []


class Batch:
    """What one round decides.

    Args:
        round: the round's number.

    Attributes:
        round: the round's number.
        requests: those of which something is computed, in batch order.
        retracted: those that had to give their pages up.
    """

    def __init__(self, round: int) -> None:
        self.round = round
        self.requests: list[Request] = []
        self.retracted: list[int] = []
        self._ended: list[int] = []
        self._reasons: list[FinishReason | None] = []
        self._started: list[Started] = []
        self._sequences: list[Sequence] = []
        self._given: dict[int, list[int]] = {}
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
        assert request.holding is not None
        if not request.has_started:
            request.has_started = True
            output_ids = request.tokens[request.prompt_tokens :].tolist()
            cached = min(request.length, request.prompt_tokens)
            self._started.append(Started(request.uid, request.prompt_tokens, cached, output_ids))
        self._tokens.append(TokenWrite(slot, 0, request.tokens[:]))
        self._params.append(SlotParams(slot, params.temperature, params.top_k, params.top_p, params.min_p, params.seed))
        self.give(request, 0, request.holding.pages.copy())

    def give(self, request: Request, start: int, pages: list[int]) -> None:
        """Put pages into a request's row, from page index ``start`` on."""
        self._pages.append(PageWrite(request.slot, start, pages))
        given = self._given.get(request.uid)
        self._given[request.uid] = given + pages if given else pages

    def prefill(self, request: Request, tokens: int) -> None:
        """Compute the next ``tokens`` known tokens of a request."""
        start, end = request.length, request.length + tokens
        draws = end == request.known
        self._draws_all &= draws
        self._sequences.append(Sequence(request.slot, start, end, draws))
        self.requests.append(request)
        request.length = end

    def decode(self, requests: Collection[Request]) -> None:
        """Compute the newest token of each request."""
        add = self._sequences.append
        for request in requests:
            start = request.length
            request.length = end = start + 1
            add(Sequence(request.slot, start, end, True))
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
        uids = [*self._ended, *[request.uid for request in self.requests]]
        given = self._given
        return RoundDecisions(
            uids=uids,
            pages=[given.get(uid, NOTHING) for uid in uids] if given else [],
            lengths=[*[0] * ended, *[sequence.end for sequence in self._sequences]],
            tokens=[*[NO_TOKEN] * ended, *tokens],
            finished=[*self._reasons, *finished],
            retracted=self.retracted,
        )

    def begun(self) -> RoundDecisions:
        """What is decided as long as no token is known."""
        return self.decisions([NO_TOKEN] * len(self.requests), [None] * len(self.requests))

    def output(self, decisions: RoundDecisions) -> StepOutput | None:
        """What clients hear of those decisions; None if that is nothing."""
        uids, tokens, finished = decisions.uids, decisions.tokens, decisions.finished
        if NO_TOKEN in tokens:
            told = [row for row, token in enumerate(tokens) if token != NO_TOKEN or finished[row]]
            uids, tokens, finished = [uids[r] for r in told], [tokens[r] for r in told], [finished[r] for r in told]
        if not uids and not self._started:
            return None
        return StepOutput(self.round, uids, tokens, finished, self._started)
