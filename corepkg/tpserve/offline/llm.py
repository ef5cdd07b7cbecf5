"""The engine as a Python object."""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Callable, Generator, Sequence, Sized
from contextlib import closing
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

import msgspec
from msgspec.structs import asdict, replace

from tpserve.errors import RequestError
from tpserve.frontend.fit import fit
from tpserve.frontend.prompt import encode_prompt
from tpserve.messages import GREEDY_BELOW, Abort, ChatPrompt, Generate, SamplingParams
from tpserve.offline.answers import Answer, Completion
from tpserve.offline.running import start_engine
from tpserve.settings import load_settings
from tpserve.step import EngineLimits
from tpserve.tokens import pack_ids, unpack_ids
from tpserve.values import is_text

__all__ = ["LLM", "Prompt", "PromptError"]

Prompt = str | list[int] | ChatPrompt
"""A text, token ids, or a conversation."""


class PromptError(RequestError):
    """A prompt, or its parameters, cannot be served.

    Args:
        index: its place among those given.
        error: what is wrong with it.
    """

    def __init__(self, index: int, error: RequestError) -> None:
        super().__init__(error.message, error.param, error.code, error.status)
        self.index = index

    def __str__(self) -> str:
        return f"prompts[{self.index}]: {self.message}"


class LLM:
    """A model, ready to complete prompts; the scheduler runs on a thread of this process.

        with LLM() as llm:
            for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
                print(completion.text)

    With ``tp`` above 1 the other ranks are processes of their own. Nothing is left of them after :meth:`close`, which
    also happens at the end of a ``with`` block, and at the latest when this process ends.

    Args:
        model: a folder, a .gguf file or a hub id; the embedded default model if left out.
        tp: tensor-parallel ranks.
        loading: called while weights are loaded with the bytes done and their total.
        settings: further fields of :class:`~tpserve.config.ServeConfig`; they win over TPSERVE_ variables.

    Raises:
        ConfigError: a setting is wrong.
        ModelError: there is no such model, it is not supported, or cannot be split over so many ranks.
        PluginError: a part that was asked for cannot be used.
        LaunchError: this machine has too little memory, or too few devices; or a rank did not come up.
    """

    def __init__(
        self,
        model: str | Path = "",
        tp: int = 1,
        *,
        loading: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        config = load_settings({"model": str(model), "tp": tp, **settings}, [], None, os.environ, label=str)
        self._engine = start_engine(config, loading)
        self._finalizer = weakref.finalize(self, self._engine.close)
        self._uids = itertools.count()
        self._busy = Lock()

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Completion]:
        """Complete prompts, all in one go.

        Args:
            prompts: texts, token ids or conversations.
            params: for all prompts, or one for each. Without ``max_tokens`` a completion may fill the context.
            progress: called after each completion with how many there are and how many there will be.

        Returns:
            The completions, in the order of the prompts.

        Raises:
            PromptError: a prompt or its parameters cannot be served; nothing was computed.
            RankError: the engine has failed.
        """
        completions: dict[int, Completion] = {}
        with closing(self.as_completed(prompts, params)) as finished:
            for completion in finished:
                completions[completion.index] = completion
                if progress:
                    progress(len(completions), len(prompts))
        return [completions[index] for index in range(len(prompts))]

    def as_completed(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Generator[Completion]:
        """Complete prompts like :meth:`generate`, and yield each completion when it has finished.

        Prompts are checked at once and computed from the first ``next()`` on. Whatever has not finished when the
        iterator is closed is aborted; until then there can be no other call.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Sized):
            raise TypeError("prompts must be a list; put a single prompt into one")
        shared = SamplingParams() if params is None else params
        if not isinstance(shared, SamplingParams | list | tuple):
            raise TypeError(f"params must be SamplingParams, or a list of one for each prompt, not {shared!r}")
        each = [shared] * len(prompts) if isinstance(shared, SamplingParams) else list(shared)
        if len(each) != len(prompts):
            raise RequestError(f"there are {len(prompts)} prompts and {len(each)} params", "params")
        return self._serve([self._request(index, prompts[index], each[index]) for index in range(len(prompts))])

    @property
    def limits(self) -> EngineLimits:
        """What the engine has: its vocabulary, its longest context, its pages."""
        return self._engine.limits

    def close(self) -> None:
        """Stop all ranks and let go of the model. May be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> Generate:
        try:
            checked = _checked(params)
            tokens = self._tokens(prompt)
            max_tokens = fit(tokens, checked.max_tokens, self._engine.limits, "prompt")
        except RequestError as error:
            raise PromptError(index, error) from None
        seed = secrets.randbits(63) if checked.seed is None else checked.seed
        return Generate(next(self._uids), pack_ids(tokens), replace(checked, max_tokens=max_tokens, seed=seed))

    def _tokens(self, prompt: Prompt) -> list[int]:
        try:
            if isinstance(prompt, ChatPrompt):
                msgspec.convert(prompt.messages, list[dict[str, Any]])
            elif not isinstance(prompt, str):
                return msgspec.convert(prompt, list[int])
            return encode_prompt(self._engine.codec, prompt, self._engine.limits, "prompt")
        except msgspec.ValidationError as error:
            raise RequestError(f"neither a text, nor token ids, nor a ChatPrompt: {error}", "prompt") from None

    def _serve(self, requests: list[Generate]) -> Generator[Completion]:
        answers = {request.uid: self._answer(index, request) for index, request in enumerate(requests)}
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("this LLM is busy with another call; read that to its end, or close its iterator")
        engine = self._engine
        try:
            engine.put(requests)
            while answers:
                output = engine.next()
                for started in output.started:
                    if started.uid in answers:
                        answers[started.uid].cached_tokens = started.cached_tokens
                for uid, token, finish in zip(output.uids, output.tokens, output.finished, strict=True):
                    if uid not in answers:
                        continue
                    if answers[uid].add(token, finish):
                        engine.put([Abort(uid)])
                    completion = answers[uid].completion
                    if completion:
                        del answers[uid]
                        yield completion
        finally:
            engine.put([Abort(uid) for uid in answers])
            self._busy.release()

    def _answer(self, index: int, request: Generate) -> Answer:
        return Answer(index, len(unpack_ids(request.prompt_ids)), self._engine.codec.stream(), request.params.stop)


def _checked(params: SamplingParams) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise RequestError(f"expected SamplingParams, found {params!r}", "params")
    try:
        checked = msgspec.convert(asdict(params), SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling parameters: {error}", "params") from None
    if not all(map(is_text, checked.stop)):
        raise RequestError("sampling parameters: a stop text has a lone surrogate, which is no character", "params")
    return checked if checked.temperature >= GREEDY_BELOW else replace(checked, temperature=0.0)
