"""Gloo groups: members meet through a file, without torch's global state, on the loopback interface."""

import time

import psutil
import pytest

from tpserve.distributed.gloo import make_group
from tpserve.errors import DeadlineExceeded
from tpserve.testing.lab import Task


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


def test_members_meet_and_compute(tmp_path):
    import torch

    joining = [Task(make_group, tmp_path / "meet", rank, 3, 30.0) for rank in range(3)]
    groups = [task.result() for task in joining]
    assert not torch.distributed.is_initialized()
    tensors = [torch.full((4,), float(rank)) for rank in range(3)]
    for work in [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]:
        work.wait()
    assert all(tensor.tolist() == [3.0] * 4 for tensor in tensors)


def test_members_listen_on_loopback_only(tmp_path):
    before = listening()
    groups = [task.result() for task in [Task(make_group, tmp_path / "meet", rank, 2, 30.0) for rank in range(2)]]
    opened = listening() - before
    assert len(groups) == 2
    assert {ip for ip, _port in opened} == {"127.0.0.1"}


def test_a_missing_member_is_an_error(tmp_path):
    with pytest.raises(DeadlineExceeded, match="rank 0 of 2"):
        make_group(tmp_path / "meet", 0, 2, 0.5)


def test_joining_may_take_longer_than_an_operation(tmp_path):
    first = Task(make_group, tmp_path / "meet", 0, 2, 0.5, 30.0)
    time.sleep(1)
    second = make_group(tmp_path / "meet", 1, 2, 0.5, 30.0)
    assert (first.result().rank(), second.rank()) == (0, 1)
