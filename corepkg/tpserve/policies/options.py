"""What can be set about the built-in policies; imports nothing large."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from tpserve.api import Options

__all__ = ["BatchingOptions", "LpmOptions", "PriorityOptions"]


class BatchingOptions(Options, frozen=True, kw_only=True):
    """How steps are filled, whoever comes next.

    Attributes:
        order: ``mixed``: all that decode, and prompts with the rest of a step's tokens. ``prefill``: steps of prompts
            alone, as long as there are any, and steps of decoding alone, one in 16 at least. ``decode``: likewise, but
            prompts begin when nothing decodes any more.
        reserve: the share of the pages that running requests may yet take which is kept back when another is admitted.
            1 never has to take pages back from a request; less lets more run at a time.
    """

    order: Literal["mixed", "prefill", "decode"] = "mixed"
    reserve: Annotated[float, Meta(ge=0, le=1)] = 0.5


class LpmOptions(BatchingOptions, frozen=True, kw_only=True):
    """How ``lpm`` chooses.

    Attributes:
        window: how many of those that wait longest are compared; in a round, 16 of them are looked up anew.
        ageing: cached tokens that a round of waiting makes up for.
    """

    window: Annotated[int, Meta(ge=1, le=1024)] = 64
    ageing: Annotated[int, Meta(ge=1, le=1 << 20)] = 8


class PriorityOptions(BatchingOptions, frozen=True, kw_only=True):
    """How ``priority`` chooses.

    Attributes:
        ageing: rounds of waiting that make up for one step of priority.
    """

    ageing: Annotated[int, Meta(ge=1, le=1 << 20)] = 100
