"""CUDA graphs: a piece of work, recorded once, that the device repeats without the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpserve.engine.decode import Recorded

__all__ = ["GraphRecorder", "ladder"]

LARGEST = 512
"""Larger batches keep the device busy for longer than the host needs to launch them."""


def ladder(running: int) -> list[int]:
    """The batch sizes to record, rising, for at most ``running`` requests.

    A batch is padded to the next of them, and a row of padding takes nearly as much time and power as another.
    """
    most = min(running, LARGEST)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST, 32)]
    return [*(size for size in sizes if size < most), most]


class GraphRecorder:
    """Records work on a stream of its own; all graphs take turns in one pool of memory.

    A later recording may reuse memory of an earlier one, but for results that are still referred to: so the largest
    comes first, and graphs run one after the other.

    Args:
        device: the CUDA device.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Recorded:
        """Do the work once, so that whatever is compiled or allocated for good is there, and then record it."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return Recorded(graph.replay, result)
