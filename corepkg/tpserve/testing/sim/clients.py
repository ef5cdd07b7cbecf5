"""Who asks: each request's answer is known beforehand, and what comes is held to it, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tpserve.messages import FinishReason, Generate, SamplingParams, Started, StepOutput
from tpserve.step import EngineLimits
from tpserve.testing.fake_engine import continuation
from tpserve.tokens import pack_ids, unpack_ids

__all__ = ["Asked", "Clients", "Failure"]


class Failure(Exception):
    """A simulation has found something wrong."""


class Asked:
    """A request and what has come of it.

    Attributes:
        message: the request.
        answer: the tokens that it must get, if nobody aborts it.
        reason: why it then ends.
        limit: the tokens that it may take, prompt and output.
        got: how many of them have come.
        has_started: whether this generation of ranks has said that it started.
        is_aborted: whether it may end with ``abort``.
    """

    def __init__(self, message: Generate, limits: EngineLimits) -> None:
        params, prompt = message.params, len(unpack_ids(message.prompt_ids))
        assert params.max_tokens is not None
        known = unpack_ids(message.prompt_ids + message.output_ids)
        self.message = message
        self.limit = min(prompt + params.max_tokens, limits.max_context)
        self.answer: list[int] = []
        self.reason: FinishReason = "error"
        if known and len(known) <= limits.max_context:
            self._answer(known, params, limits)
        self.got = 0
        self.has_started = False
        self.is_aborted = False

    def _answer(self, known: Sequence[int], params: SamplingParams, limits: EngineLimits) -> None:
        if len(known) < self.limit and self.limit - 1 > limits.pages * limits.page_size:
            return
        self.reason = "length"
        self.answer = continuation(known, params, self.limit - len(known), limits)
        stop = next((index for index, token in enumerate(self.answer) if token in limits.eos_ids), None)
        if stop is not None and not params.ignore_eos:
            self.answer, self.reason = self.answer[: stop + 1], "stop"

    def resume(self) -> Generate:
        """The request as it is sent to ranks that know nothing of the first ones."""
        self.has_started = False
        return replace(self.message, output_ids=self.message.output_ids + pack_ids(self.answer[: self.got]))


class Clients:
    """All who ask.

    Attributes:
        alive: the requests that have not been answered, by uid, oldest first.
        answered: how many have been.
        is_ending: a Shutdown is on its way, so anyone may be aborted.
    """

    def __init__(self, limits: EngineLimits) -> None:
        self.alive: dict[int, Asked] = {}
        self.answered = 0
        self.is_ending = False
        self._limits = limits
        self._latest = -1
        self._let_go: list[int] = []
        self._must_be_gone: list[int] = []

    def ask(self, message: Generate, *, is_aborted: bool) -> None:
        """Send a request; ``is_aborted`` if its abort went before it."""
        self.alive[message.uid] = Asked(message, self._limits)
        if is_aborted:
            self.abort(message.uid)

    def abort(self, uid: int) -> None:
        """Let a request go."""
        if uid in self.alive:
            self.alive[uid].is_aborted = True
            self._let_go.append(uid)

    def resubmit(self) -> list[Generate]:
        """What other ranks have to finish; whoever was let go is not asked for any more."""
        self._latest = -1
        self._let_go, self._must_be_gone = [], []
        self.alive = {uid: asked for uid, asked in self.alive.items() if not asked.is_aborted}
        return [asked.resume() for asked in self.alive.values()]

    def deliver(self, output: StepOutput) -> None:
        """Take what a round brought."""
        if output.round <= self._latest or not (output.uids or output.started):
            raise Failure(f"an output of round {output.round} after one of round {self._latest}: {output}")
        self._latest = output.round
        for started in output.started:
            self._start(started)
        for uid, token, reason in zip(output.uids, output.tokens, output.finished, strict=True):
            asked = self.alive.get(uid)
            if asked is None:
                raise Failure(f"request {uid} gets {token}, {reason} after its end")
            if token != -1:
                self._take(uid, asked, token)
            if reason:
                self._finish(uid, asked, reason)
            elif token == -1:
                raise Failure(f"request {uid} gets neither a token nor its end")

    def check_aborts(self, all_taken: bool) -> None:
        """Fail if a round after the leader took its abort a request still lives.

        Args:
            all_taken: whether the leader has taken all that was sent.
        """
        for uid in self._must_be_gone:
            if uid in self.alive:
                raise Failure(f"request {uid} lives on after its abort")
        self._must_be_gone = []
        if all_taken:
            self._must_be_gone, self._let_go = self._let_go, []

    def _start(self, started: Started) -> None:
        asked = self.alive.get(started.uid)
        if asked is None or asked.has_started:
            raise Failure(f"request {started.uid} starts twice, or after its end")
        asked.has_started = True
        prompt = len(asked.message.prompt_ids) // 4
        outputs = [*unpack_ids(asked.message.output_ids), *asked.answer[: asked.got]]
        if started.prompt_tokens != prompt or started.output_ids != outputs or not 0 <= started.cached_tokens <= prompt:
            raise Failure(f"request {started.uid} starts with {started}, {prompt} tokens and {outputs}")

    def _take(self, uid: int, asked: Asked, token: int) -> None:
        if not asked.has_started:
            raise Failure(f"request {uid} gets a token before its start")
        if asked.got == len(asked.answer) or token != asked.answer[asked.got]:
            raise Failure(f"request {uid} gets {token} as token {asked.got} of {asked.answer}")
        asked.got += 1

    def _finish(self, uid: int, asked: Asked, reason: FinishReason) -> None:
        if reason == "abort":
            is_right = asked.is_aborted or self.is_ending
        else:
            is_right = reason == asked.reason and asked.got == len(asked.answer)
        if not is_right:
            raise Failure(f"request {uid} ends with {reason} after {asked.got} of {len(asked.answer)} tokens")
        del self.alive[uid]
        self.answered += 1
