"""What a request must fit into, the same for every way in."""

from __future__ import annotations

from tpserve.errors import RequestError
from tpserve.step import EngineLimits

__all__ = ["fit"]


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
    if len(tokens) >= limits.max_context:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; the context holds {limits.max_context}, output included",
            field,
            "context_length_exceeded",
        )
    if len(tokens) >= pool:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; the KV pool holds {pool}, output included",
            field,
            "kv_pool_exceeded",
        )
    room = min(limits.max_context, pool) - len(tokens)
    if max_tokens is None:
        return room
    if max_tokens > room:
        name, code = (
            ("context", "context_length_exceeded") if pool >= limits.max_context else ("KV pool", "kv_pool_exceeded")
        )
        raise RequestError(
            f"{len(tokens)} tokens of prompt and {max_tokens} of output exceed the {name} of {len(tokens) + room}",
            "max_tokens",
            code,
        )
    return max_tokens
