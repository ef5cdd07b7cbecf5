"""What is asked of a server: random token ids, or conversations that people had; both a function of the seed."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from tpserve.errors import ConfigError
from tpserve.values import read_json

__all__ = ["Prompt", "Prompts", "Workload", "request"]

FIRST_ID = 100
"""Lower ids are special in many vocabularies."""

CHARACTERS_PER_TOKEN = 4
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""Conversations outside these tokens are left out: of prompt and answer each, of the prompt, of both together."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one run.

    Attributes:
        dataset: ``random`` token ids, or the first question of conversations in ShareGPT's format.
        dataset_path: file of the latter.
        backend: ``openai`` asks for completions, ``openai-chat`` for chats.
        num_prompts: how many.
        input_len: tokens of a random prompt.
        output_len: tokens to generate for it; of a conversation, None: about as long as the answer there.
        range_ratio: both lengths vary evenly by this share up and down.
        vocab_size: random ids lie below.
        ignore_eos: go on past the end of text.
    """

    dataset: Literal["random", "sharegpt"] = "random"
    dataset_path: str = ""
    backend: Literal["openai", "openai-chat"] = "openai"
    num_prompts: int = 100
    input_len: int = 128
    output_len: int | None = 64
    range_ratio: float = 0.0
    vocab_size: int = 32000
    ignore_eos: bool = True


class Prompt(msgspec.Struct, frozen=True):
    """One request's content.

    Attributes:
        content: token ids or text.
        max_tokens: most tokens to generate.
    """

    content: list[int] | str
    max_tokens: int


class Turn(msgspec.Struct, frozen=True):
    """One message."""

    value: str = ""


class Talk(msgspec.Struct, frozen=True):
    """One conversation."""

    conversations: list[Turn] = []


class Prompts:
    """Where a workload's prompts come from.

    Args:
        workload: which.

    Raises:
        ConfigError: the file cannot be read, or has too few conversations.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._questions = _read_questions(workload) if workload.dataset == "sharegpt" else []

    def draw(self, count: int, random: Random) -> list[Prompt]:
        """So many prompts, at most ``num_prompts``."""
        if self._workload.dataset == "sharegpt":
            return random.sample(self._questions, count)
        return [_random_prompt(self._workload, random) for _ in range(count)]


def request(workload: Workload, prompt: Prompt, model: str) -> tuple[str, dict[str, Any]]:
    """The path and the body that ask for a prompt, greedily."""
    body: dict[str, Any] = {"model": model, "max_tokens": prompt.max_tokens, "temperature": 0}
    if workload.ignore_eos:
        body["ignore_eos"] = True
    if workload.backend == "openai":
        return "/v1/completions", {**body, "prompt": prompt.content}
    return "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": prompt.content}]}


def _random_prompt(workload: Workload, random: Random) -> Prompt:
    def vary(length: int) -> int:
        spread = int(length * workload.range_ratio)
        return max(1, random.randint(length - spread, length + spread))

    assert workload.output_len is not None
    ids = random.choices(range(FIRST_ID, workload.vocab_size), k=vary(workload.input_len))
    return Prompt(ids, vary(workload.output_len))


def _read_questions(workload: Workload) -> list[Prompt]:
    path = Path(workload.dataset_path)
    try:
        talks = read_json(path.read_bytes(), list[Talk])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not in ShareGPT's format: {error}") from None
    prompts = [prompt for talk in talks if (prompt := _first_question(talk, workload.output_len))]
    if len(prompts) < workload.num_prompts:
        raise ConfigError(
            f"{path} has {len(prompts)} conversations of a useful length, fewer than --num-prompts "
            f"{workload.num_prompts}",
            f"Useful: question and answer of {SHORTEST} tokens or more, the question of {LONGEST_PROMPT} at most, and "
            f"{LONGEST} with what is generated; {CHARACTERS_PER_TOKEN} characters count as a token",
        )
    return prompts


def _first_question(talk: Talk, output_len: int | None) -> Prompt | None:
    """What a person asked first, unless it or the answer is very short or long."""
    if len(talk.conversations) < 2:
        return None
    question, answer = (turn.value for turn in talk.conversations[:2])
    asked, said = (len(text) // CHARACTERS_PER_TOKEN for text in (question, answer))
    max_tokens = output_len or said
    is_useful = min(asked, said) >= SHORTEST and asked <= LONGEST_PROMPT and asked + max_tokens <= LONGEST
    return Prompt(question, max_tokens) if is_useful else None
