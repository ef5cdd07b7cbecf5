from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

from tpserve.api import CommContext, CommSpec, NoOptions, PeerLost
from tpserve.comm.gloo import GlooComm
from tpserve.plugins.builtin import tpserve_comms
from tpserve.testing.comm import CommContract


class TestGloo(CommContract):
    @pytest.fixture
    def spec(self) -> CommSpec:
        return next(spec for spec in tpserve_comms() if spec.name == "gloo")


def test_an_error_names_the_rank_and_the_operation(tmp_path: Path) -> None:
    joined = Event()

    def rank(number: int) -> str:
        comm = GlooComm(NoOptions(), CommContext(number, 2, tmp_path, "comm", "cpu", timeout=30.0))
        try:
            if number == 1:
                assert joined.wait(60)
                return ""
            joined.set()
            while True:
                comm.all_reduce(torch.ones(8))
        except PeerLost as error:
            return str(error)
        finally:
            comm.close()

    with ThreadPoolExecutor(2) as pool:
        said = next(pool.map(rank, range(2)))
    assert said == f"rank 0 of 2, all_reduce: a rank of the group at {tmp_path}/comm has gone"
