"""Log lines with their place, the same in every process of a server."""

from __future__ import annotations

import logging
import sys

__all__ = ["rank_place", "set_up_logging"]

FORMAT = "%(asctime)s %(levelname)-7s [{place}] %(message)s"

QUIET = ("asyncio", "filelock", "fsspec", "httpcore", "httpx", "urllib3", "uvicorn")
"""Libraries whose info lines say nothing about the server."""


def rank_place(rank: int) -> str:
    """Name a rank by its place in each kind of parallelism."""
    return f"DP0 PP0 TP{rank}"


def set_up_logging(place: str, level: str) -> None:
    """Send this process's log to standard error, each line with time, level and place.

    Args:
        place: who writes: ``DP0 PP0 TP1``, ``api``, ``tokenizer0``.
        level: debug, info, warning or error.
    """
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=FORMAT.format(place=place),
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    logging.captureWarnings(capture=True)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
