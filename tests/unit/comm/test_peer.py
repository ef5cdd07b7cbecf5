"""The peer comm without GPUs: its kernel in Triton's interpreter, and what goes to NCCL instead."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tpserve.api import CommContext
from tpserve.comm import nccl, probe
from tpserve.comm.options import PeerCommOptions
from tpserve.distributed.peers import PLACE, PeerError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

LIMIT = 300.0
KIB = 1024


@pytest.mark.slow
def test_ranks_add_up_what_they_send_each_other() -> None:
    script = Path(__file__).with_name("peer_ranks.py")
    environ = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script, "2", "3"], env=environ, check=True, timeout=LIMIT)


class Communicator:
    """A rank of NCCL, of which the others always do as this one."""

    def __init__(self, id: bytes, rank: int, size: int, device: torch.device) -> None:
        self.calls: list[str] = []

    def all_reduce(self, tensor: torch.Tensor, operator: int = 0) -> None:
        self.calls.append(f"all_reduce {tensor.nbytes}")

    def all_gather(self, tensor: torch.Tensor, gathered: torch.Tensor) -> None:
        gathered.copy_(tensor.expand_as(gathered))

    def abort(self) -> None:
        """Nothing runs."""

    def destroy(self) -> None:
        """Nothing is held."""


class Memory:
    """Memory of a GPU, which another reaches, or does not."""

    refuses: ClassVar[bool] = False

    def __init__(self, size: int, device: torch.device) -> None:
        self.place = PLACE.pack(b"", b"", size, 0)

    def open(self, places: list[bytes]) -> list[int]:
        if self.refuses:
            raise PeerError("the CUDA driver's cuIpcOpenMemHandle_v2 says: invalid device context")
        return [PLACE.unpack(place)[2] for place in places]


class Done:
    """A CUDA event that the device has come to."""

    def record(self, stream: object) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "Communicator", Communicator)
    monkeypatch.setattr(nccl, "make_id", lambda: bytes(128))
    monkeypatch.setattr(nccl, "LOOK", 0.05)
    monkeypatch.setattr("tpserve.comm.peer.PeerMemory", Memory)
    monkeypatch.setattr(torch.cuda, "Event", Done)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setenv(nccl.INTERFACE, "lo")


def on_ranks(folder: Path, work: Callable[[Any, list[str]], Any], largest: int = 64 * KIB, size: int = 2) -> list[Any]:
    """What each rank's comm does, and what is launched for it."""
    from tpserve.comm.peer import PeerComm

    def rank(number: int) -> Any:
        context = CommContext(number, size, folder, "comm", "cpu", 60.0, 60.0)
        comm = PeerComm(PeerCommOptions(largest=largest), context)
        launched = comm._nccl.calls  # type: ignore[union-attr]
        launched.clear()
        comm._launch = lambda whole, table: launched.append(f"own {whole.nbytes} {table[0]}")  # type: ignore[method-assign]
        try:
            return work(comm, launched)
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def sums(comm: Any, launched: list[str]) -> list[str]:
    for x in (
        torch.ones(4),
        torch.ones(64 * KIB // 4),
        torch.ones(4, 8, dtype=torch.bfloat16).t(),
        torch.ones(9)[1:],
        torch.ones(5),
        torch.ones(64 * KIB // 4 + 4),
        torch.ones(8, dtype=torch.int64),
        torch.ones(0),
    ):
        assert torch.equal(comm.all_reduce(x), x)
    return list(launched)


def test_small_sums_are_our_own(tmp_path: Path) -> None:
    memory = 3 * 2 * 64 * KIB
    own = [f"own {size} {memory}" for size in (16, 64 * KIB, 64, 32)]
    theirs = [f"all_reduce {size}" for size in (20, 64 * KIB + 16, 64, 0)]
    assert on_ranks(tmp_path, sums) == [own + theirs] * 2


def test_nothing_can_be_gathered(tmp_path: Path) -> None:
    def work(comm: Any, launched: list[str]) -> list[torch.Size]:
        return [comm.all_gather(torch.ones(shape)).shape for shape in ((0, 5), (3, 0))]

    assert on_ranks(tmp_path, work) == [[(0, 10), (3, 0)]] * 2


def test_where_a_gpu_cannot_write_to_another_all_sums_are_those_of_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Memory, "refuses", True)
    assert all(call.startswith("all_reduce") for calls in on_ranks(tmp_path, sums) for call in calls)
    assert "NCCL computes all sums: the CUDA driver's cuIpcOpenMemHandle_v2 says" in caplog.text


def test_no_sum_is_small_enough_for_a_limit_of_nothing(tmp_path: Path) -> None:
    assert all(call.startswith("all_reduce") for calls in on_ranks(tmp_path, sums, 0) for call in calls)


def test_of_more_ranks_only_smaller_sums_are_our_own(tmp_path: Path) -> None:
    def work(comm: Any, launched: list[str]) -> list[str]:
        for size in (16 * KIB, 16 * KIB + 16):
            comm.all_reduce(torch.ones(size // 4))
        return list(launched)

    memory = 3 * 3 * 16 * KIB
    expected = [f"own {16 * KIB} {memory}", f"all_reduce {16 * KIB + 16}"]
    assert on_ranks(tmp_path, work, size=3) == [expected] * 3


def test_a_rank_that_has_gone_ends_kernels_that_wait(tmp_path: Path) -> None:
    def work(comm: Any, launched: list[str]) -> int:
        if comm.context.rank == 1:
            return 1
        while not comm._aborted:
            comm._leaving.wait(0.01)
        comm._watcher.join()
        return int(comm._stop)

    assert on_ranks(tmp_path, work) == [1, 1]


class Driver:
    """Devices of which all but the last two are linked."""

    def cuDeviceGetP2PAttribute(self, found: Any, attribute: int, here: int, there: int) -> int:  # noqa: N802
        found._obj.value = attribute == probe.ATOMICS and {here, there} != {1, 2}
        return 0


def test_the_probe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.probe_peer() is not None
    monkeypatch.setattr(probe, "probe_nccl", lambda: None)
    monkeypatch.setattr("ctypes.CDLL", lambda name: Driver())
    monkeypatch.setattr(probe, "cuda_devices", lambda: [90, 90])
    assert probe.probe_peer() is None
    monkeypatch.setattr(probe, "cuda_devices", lambda: [90, 90, 90])
    assert probe.probe_peer() == "GPUs 1 and 2 are not linked by NVLink"
