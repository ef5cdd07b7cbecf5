"""tpserve: serve large language models from peer scheduler processes whose parts are plugins."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tpserve.version import __version__

if TYPE_CHECKING:
    from tpserve.messages import ChatPrompt, SamplingParams
    from tpserve.offline import LLM, Completion

__all__ = ["LLM", "ChatPrompt", "Completion", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "tpserve.offline",
    "ChatPrompt": "tpserve.messages",
    "Completion": "tpserve.offline",
    "SamplingParams": "tpserve.messages",
}


def __getattr__(name: str) -> Any:
    """Import what is exported here on first use, so that ``import tpserve`` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tpserve' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
