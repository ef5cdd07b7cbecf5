"""Sums between the GPUs of this host, by size: ``nccl`` against ``peer``, in a CUDA graph and launched one by one.

    python benchmarks/sums.py --ranks 2
    python benchmarks/sums.py --ranks 2 --tiles 4096x4,8192x8

A graph holds 50 sums in a row of the same tensor (bfloat16); the comms take turns in the same processes. Microseconds a
sum on the slowest rank, medians of 20 replays. ``--tiles`` tries other blocks (bytes) and warps of the kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as processes

from tpserve.api import Comm, CommContext, NoOptions
from tpserve.bench.arguments import check_gpus, whole
from tpserve.comm import peer
from tpserve.comm.nccl import NcclComm
from tpserve.comm.options import PeerCommOptions

KIB = 1024
SUMS, REPLAYS = 50, 20


def clocked(comm: Comm, device: torch.device, size: int, *, graph: bool) -> float:
    """Microseconds a sum on this rank."""
    fresh = torch.randn(size // 2, device=device, dtype=torch.bfloat16) * 1e-20
    x = fresh.clone()

    def work() -> None:
        for _ in range(SUMS):
            comm.all_reduce(x)

    work()
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
            work()
        run = recorded.replay
    else:
        run = work
    took = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        x.copy_(fresh)
        comm.min(0)
        comm.all_reduce(x)  # ranks begin together
        begin.record()
        run()
        end.record()
        comm.wait(end)
        took.append(1e3 * begin.elapsed_time(end) / SUMS)
    return statistics.median(took)


def rank(number: int, options: argparse.Namespace, folder: str) -> None:
    """Measure, and let rank 0 print."""
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    comms: dict[str, Comm] = {}

    def context(name: str) -> CommContext:
        return CommContext(number, options.ranks, Path(folder), name, str(device), 60.0)

    comms["nccl"] = NcclComm(NoOptions(), context("nccl"))
    for tile in options.tiles:
        if tile:
            peer.BLOCK, peer.WARPS = map(int, tile.split("x"))
        made = peer.PeerComm(PeerCommOptions(largest=options.largest), context(f"peer{tile}"))
        block, warps = peer.BLOCK, peer.WARPS
        comms[f"{block}x{warps}"] = made
    names = list(comms)
    if not number:
        print("KiB", *names, *(f"{name} one by one" for name in names), sep="\t", flush=True)
    for size in (KIB << step for step in range(1, 15)):
        row = []
        for graph in (True, False) if size in (2 * KIB, 128 * KIB, 2048 * KIB) else (True,):
            for name in names:
                if name != "nccl":
                    peer.BLOCK, peer.WARPS = map(int, name.split("x"))
                mine = clocked(comms[name], device, size, graph=graph)
                row.append(-comms["nccl"].min(-round(100 * mine)) / 100)
        if not number:
            print(size // KIB, *row, sep="\t", flush=True)
    os._exit(0)  # graphs held sums; nothing is taken down in good order


def tiles(text: str) -> list[str]:
    """A list as in 4096x4,8192x8; empty: the kernel's own."""
    if not re.fullmatch(r"(\d{1,7}x\d{1,2}(,\d{1,7}x\d{1,2})*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not BLOCKxWARPS,…")
    return text.split(",")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=whole(2, 64), default=max(2, torch.cuda.device_count()))
    parser.add_argument("--largest", type=whole(0, 1 << 28), default=32 << 20, help="the option of peer")
    parser.add_argument("--tiles", type=tiles, default="", metavar="BLOCKxWARPS,…")
    options = parser.parse_args()
    check_gpus(parser, options.ranks)
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(rank, (options, folder), options.ranks)


if __name__ == "__main__":
    main()
