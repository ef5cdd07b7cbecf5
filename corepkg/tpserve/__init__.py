"""tpserve: serve large language models from peer scheduler processes whose parts are plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpserve.version import __version__

if TYPE_CHECKING:
    from tpserve.messages import SamplingParams
    from tpserve.offline import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the offline engine on first use, so that ``import tpserve`` stays light."""
    if name == "LLM":
        from tpserve.offline import LLM

        return LLM
    if name == "SamplingParams":
        from tpserve.messages import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'tpserve' has no attribute {name!r}")
