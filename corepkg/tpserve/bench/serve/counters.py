"""What a server says of itself on ``/metrics``, to be held against what the client counted."""

from __future__ import annotations

import re

import msgspec

from tpserve.bench.client import get
from tpserve.bench.http import BrokenOff, Origin

__all__ = ["Counts", "read_counts", "scrape"]

NAMES = {
    "prompt_tokens": {"prompt_tokens_total"},
    "cached_tokens": {"prompt_tokens_cached_total", "cached_tokens_total"},
    "generation_tokens": {"generation_tokens_total"},
}
"""The names of each counter behind the server's prefix."""

SAMPLE = re.compile(r"^(?:\w+:|tpserve_)(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


class Counts(msgspec.Struct, frozen=True):
    """Tokens.

    Attributes:
        prompt_tokens: of all prompts.
        cached_tokens: of them in the prefix cache.
        generation_tokens: generated.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.generation_tokens + other.generation_tokens,
        )

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.prompt_tokens - other.prompt_tokens,
            self.cached_tokens - other.cached_tokens,
            self.generation_tokens - other.generation_tokens,
        )

    def __str__(self) -> str:
        return (
            f"{self.prompt_tokens:,} prompt tokens ({self.cached_tokens:,} cached) "
            f"and {self.generation_tokens:,} generated"
        )


def read_counts(text: str) -> Counts | None:
    """Find the counters in a page in Prometheus's format, of whatever server; None if they are not there."""
    found = dict.fromkeys(NAMES, 0)
    seen = set()
    for name, value in SAMPLE.findall(text):
        for field, names in NAMES.items():
            if name in names:
                found[field] += int(float(value))
                seen.add(field)
    return Counts(**found) if {"prompt_tokens", "generation_tokens"} <= seen else None


async def scrape(origin: Origin) -> Counts | None:
    """Ask a server for its counters; None if it does not tell."""
    try:
        status, body = await get(origin, "/metrics")
    except BrokenOff:
        return None
    return read_counts(body.decode(errors="replace")) if status == 200 else None
