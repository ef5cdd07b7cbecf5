"""Requests in OpenAI's format: what is accepted, what is refused, and what it means to the engine.

A field that this server does not know, or knows and cannot do yet, is refused by name rather than ignored, since it
would change the answer; its neutral value (``n: 1``, ``logprobs: false``, null) is accepted. Fields that say nothing
about the answer (IGNORED) are accepted and not looked at.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tpserve.errors import RequestError
from tpserve.frontend.fields import PlainObject, Prompts, Stops, Text, check_plain
from tpserve.messages import GREEDY_BELOW, MAX_COUNT, MAX_PRIORITY, ChatPrompt, SamplingParams

__all__ = ["ChatRequest", "CompletionRequest", "GenerationRequest"]

IGNORED = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"},
)
"""About the client, its account or its dashboard."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "min_tokens": (0,),
    "prediction": (),
    "presence_penalty": (0, 0.0),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1, 1.0),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields of OpenAI's API, and of other servers', that are not supported, with the values that ask for nothing."""

COMPLETION_TOKENS = 16
"""What /v1/completions generates unless told otherwise, as OpenAI's does."""


class StreamOptions(BaseModel):
    """How a stream is written."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(BaseModel):
    """What chat and completion requests have in common."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: Text | None = Field(None, description="Defaults to the model that is served.")
    max_tokens: int | None = Field(None, ge=1, le=MAX_COUNT)
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=-1, le=MAX_COUNT, description="0 and -1 keep all tokens.")
    min_p: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    stop: Stops | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    ignore_eos: bool | None = None
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Larger is more urgent.")
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        """Take out what is ignored or neutral; refuse what is not known."""
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                kept[name] = value
            elif name in NEUTRAL:
                if value is not None and not any(type(value) is type(ok) and value == ok for ok in NEUTRAL[name]):
                    raise RequestError(f"{name} is not supported by this server; leave it out", name, "unsupported")
            elif name not in IGNORED and value is not None:
                raise RequestError(f"unknown field {name}", name, "unknown_field")
        return kept

    @model_validator(mode="after")
    def _check(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream: true", "stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def with_tokens(self) -> bool:
        """Whether the response carries the output's tokens."""
        return bool(self.return_token_ids)

    @property
    def limit_field(self) -> str:
        """The field that limits the output."""
        return "max_tokens"

    def sampling(self, max_tokens: int | None) -> SamplingParams:
        """The request's sampling parameters."""
        temperature = 1.0 if self.temperature is None else self.temperature
        return SamplingParams(
            temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            max_tokens=max_tokens,
            stop=tuple(self.stop or ()),
            seed=None if self.seed is None else self.seed % (1 << 63),
            ignore_eos=bool(self.ignore_eos),
        )


class TextPart(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: Text


def _text_or_parts(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise PydanticCustomError("content", "must be a string or a list of parts of type text")
    return value


Content = Annotated[Text | Annotated[list[TextPart], Field(min_length=1)], BeforeValidator(_text_or_parts)]


class Message(BaseModel):
    """One turn of a conversation. Further fields reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None

    @model_validator(mode="after")
    def _check_extra(self) -> Message:
        check_plain(self.model_extra)
        return self

    @property
    def text(self) -> str | None:
        """The content as one text, parts on lines of their own."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_COUNT, description="Wins over max_tokens.")
    chat_template_kwargs: PlainObject | None = Field(None, description="Further variables of the chat template.")

    @model_validator(mode="after")
    def _check_messages(self) -> ChatRequest:
        for index, message in enumerate(self.messages):
            if message.content is None and message.role != "assistant":
                where = f"messages[{index}].content"
                raise RequestError(f"{where} is required", where)
        return self

    @property
    def limit_field(self) -> str:
        """The field that limits the output."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def prompt(self) -> ChatPrompt:
        """The conversation."""
        messages = [
            {"role": message.role, "content": message.text, **(message.model_extra or {})} for message in self.messages
        ]
        return ChatPrompt(messages, self.chat_template_kwargs or {})

    def params(self) -> SamplingParams:
        """The sampling parameters; without a limit, the output may fill the context."""
        return self.sampling(self.max_completion_tokens or self.max_tokens)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Prompts

    def params(self) -> SamplingParams:
        """The sampling parameters."""
        return self.sampling(self.max_tokens or COMPLETION_TOKENS)
