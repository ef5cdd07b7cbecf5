"""How many pages the KV pool gets, and the pool itself."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import psutil
import torch

from tpserve.api import AttentionShape
from tpserve.errors import LaunchError

if TYPE_CHECKING:
    from tpserve.config import ServeConfig
    from tpserve.models.decoder import LayerCache

__all__ = ["allocate_caches", "check_room", "page_bytes", "page_count"]

CPU_POOL = 2 << 30
"""Most bytes of a rank's pool on the CPU unless ``kv_tokens`` says otherwise: others need that memory too."""


def check_room(shape: AttentionShape, weights: int) -> None:
    """See that there is memory for what a rank has beside its pool, before any of it is made.

    Args:
        shape: says how large its tables are: one has a row for each running request, one for each position.
        weights: bytes of its weights.

    Raises:
        LaunchError: there is not.
    """
    if shape.device.startswith("cuda"):
        kept = torch.cuda.memory_reserved(shape.device) - torch.cuda.memory_allocated(shape.device)
        room = torch.cuda.mem_get_info(shape.device)[0] + kept  # by torch, of an engine before this
    else:
        room = psutil.virtual_memory().available + psutil.swap_memory().free
    running, context = shape.max_running, shape.max_context
    row = context + -(-context // shape.page_size)
    tables = 4 * (running * row + context * shape.head_dim)
    for what, size, hint in (
        ("the weights of a rank", weights, "Take more ranks, or a smaller model"),
        (
            f"tables of {running:,} requests and {context:,} positions",
            tables,
            "Lower --max-running-requests or --max-context",
        ),
    ):
        if size > room:
            raise LaunchError(f"no room for {what}, {size / (1 << 30):,.1f} GiB, in the memory of {shape.device}", hint)


def page_bytes(shape: AttentionShape) -> int:
    """Bytes of one page, keys and values of all layers of this rank."""
    item: int = getattr(torch, shape.dtype).itemsize
    return shape.layers * 2 * shape.page_size * shape.kv_heads * shape.head_dim * item


def page_count(config: ServeConfig, shape: AttentionShape, ranks: int, reserve: int = 0) -> int:
    """Pages that this rank can offer; call it when the weights are loaded. Ranks then agree on the least.

    ``kv_tokens`` is taken as it is. Otherwise it is what is left of ``memory_fraction`` of the device beside all that
    uses it now and a ``reserve`` in bytes, for ranks that share a device a part of that, on the CPU at most
    ``CPU_POOL``; never more than every slot could fill.

    Raises:
        LaunchError: there is no room for a single page.
    """
    if config.kv_tokens:
        return -(-config.kv_tokens // shape.page_size)
    if shape.device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(shape.device)
        room = (free - (1 - config.memory_fraction) * total) / (1 if config.device_step else ranks) - reserve
    else:
        memory = psutil.virtual_memory()
        room = min((memory.available - (1 - config.memory_fraction) * memory.total) / ranks, CPU_POOL)
    if room < page_bytes(shape):
        share = f"{100 * config.memory_fraction:g} % of the memory of {shape.device}"
        raise LaunchError(
            f"no room for a KV pool: of the {share} that may be in use, all is",
            "Raise --memory-fraction, set --kv-tokens, or free memory",
        )
    useful = shape.max_running * -(-shape.max_context // shape.page_size)
    return min(int(room // page_bytes(shape)), useful)


def allocate_caches(shape: AttentionShape, pages: int) -> list[LayerCache]:
    """A pool of zeros ``[layers, 2, pages, page_size, kv_heads, head_dim]`` as keys and values of each layer.

    On the CPU its memory is taken as pages are first used.

    Raises:
        LaunchError: there is not so much memory.
    """
    size = (shape.layers, 2, pages, shape.page_size, shape.kv_heads, shape.head_dim)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    try:
        if shape.device.startswith("cuda"):
            pool = torch.zeros(size, dtype=dtype, device=shape.device)
        else:
            # torch.zeros would write, and so take, all of it now.
            pool = torch.frombuffer(mmap.mmap(-1, pages * page_bytes(shape)), dtype=dtype).view(size)
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        wanted = f"a KV pool of {pages * shape.page_size:,} tokens, {pages * page_bytes(shape) / (1 << 30):,.1f} GiB"
        raise LaunchError(f"no room for {wanted}, in the memory of {shape.device}", "Lower --kv-tokens") from error
    return [(layer[0], layer[1]) for layer in pool]
