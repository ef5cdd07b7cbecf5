"""What a request must fit into, the same for every way in."""

from __future__ import annotations

from tpserve.errors import RequestError
from tpserve.step import EngineLimits

__all__ = ["check_length", "fit"]


def fit(tokens: list[int], max_tokens: int | None, limits: EngineLimits, field: str) -> int:
    """Check a prompt and the output that is wanted against the engine's limits; how many tokens may follow the prompt.

    Args:
        tokens: the prompt.
        max_tokens: how many are wanted; None: as many as there is room for.
        limits: what the engine has.
        field: names the prompt in errors.

    Raises:
        RequestError: it does not fit.
    """
    pool = limits.pages * limits.page_size
    if not tokens:
        raise RequestError("the prompt is empty", field)
    if not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
        raise RequestError(f"token ids must be from 0 to {limits.vocab_size - 1}", field)
    check_length(len(tokens), limits, field)
    room = min(limits.max_context, pool) - len(tokens)
    if max_tokens is None:
        return room
    if max_tokens > room:
        name, code = (
            ("context", "context_length_exceeded") if pool >= limits.max_context else ("KV pool", "kv_pool_exceeded")
        )
        raise RequestError(
            f"{_count(len(tokens))} of prompt and {max_tokens} of output exceed the {name} of {len(tokens) + room}",
            "max_tokens",
            code,
        )
    return max_tokens


def check_length(tokens: int, limits: EngineLimits, field: str, qualified: str = "") -> None:
    """Check the length of a prompt alone.

    Args:
        tokens: how many it has.
        limits: what the engine has.
        field: names the prompt in errors.
        qualified: what stands before the number in errors.

    Raises:
        RequestError: it does not fit.
    """
    rooms = (
        ("context", limits.max_context, "context_length_exceeded"),
        ("KV pool", limits.pages * limits.page_size, "kv_pool_exceeded"),
    )
    for name, room, code in rooms:
        if tokens >= room:
            raise RequestError(
                f"the prompt has {qualified}{_count(tokens)}; the {name} holds {room}, output included", field, code
            )


def _count(tokens: int) -> str:
    return f"{tokens} token{'' if tokens == 1 else 's'}"
