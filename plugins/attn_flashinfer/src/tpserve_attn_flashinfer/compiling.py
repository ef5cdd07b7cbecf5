"""FlashInfer's modules, compiled when a rank starts and not while it serves."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["compile_modules"]

_log = logging.getLogger(__name__)


def compile_modules(what: str, modules: Sequence[Any]) -> None:
    """Compile those that FlashInfer does not have in its cache; ranks wait for the one that does.

    Args:
        what: what they compute, for the log.
        modules: as FlashInfer's generators return them.
    """
    missing = [module for module in modules if not (module.is_aot or module.is_compiled)]
    if not missing:
        return
    _log.info("compiling FlashInfer's kernels for %s, half a minute or more, once", what)
    begun = time.monotonic()
    for module in missing:
        module.build(verbose=False)
    _log.info("compiled in %.0f s, and kept in %s", time.monotonic() - begun, missing[0].build_dir.parent)
