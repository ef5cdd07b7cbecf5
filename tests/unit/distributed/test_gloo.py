"""Gloo groups: members meet in a directory, without torch's global state, on the loopback interface."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tpserve.api import TransportError
from tpserve.distributed.gloo import make_group
from tpserve.errors import DeadlineExceeded, PeerLost
from tpserve.testing.lab import Task, see_soon_after, soon
from tpserve.testing.processes import PATIENCE

STOPPING = Path(__file__).with_name("stopping_members.py")


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
    with pytest.raises(DeadlineExceeded, match="rank 0 waited in vain for rank 1"):
        make_group(tmp_path / "meet", 0, 2, 0.5)


def test_joining_may_take_longer_than_an_operation(tmp_path):
    first = Task(make_group, tmp_path / "meet", 0, 2, 0.5, 30.0)
    time.sleep(1)
    second = make_group(tmp_path / "meet", 1, 2, 0.5, 30.0)
    assert (first.result().rank(), second.rank()) == (0, 1)
    assert list(tmp_path.iterdir()) == []


def test_an_operation_may_take_longer_than_joining(tmp_path):
    import torch

    groups = [task.result() for task in [Task(make_group, tmp_path / "meet", rank, 2, 30.0, 1.0) for rank in range(2)]]
    first = groups[0].allreduce([torch.ones(1)])
    time.sleep(1.5)
    groups[1].allreduce([torch.ones(1)]).wait()
    first.wait()


def test_who_gives_up_takes_its_files_with_it(tmp_path):
    for rank in (1, 0):
        with pytest.raises(DeadlineExceeded):
            make_group(tmp_path / "meet", rank, 3, 0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_member_hears_that_the_first_has_given_up(tmp_path):
    from tpserve.distributed.files import FileExchange

    exchange, leader = (FileExchange(tmp_path / "meet", rank, soon()) for rank in (1, 0))
    leader.withdraw(of_all=True)
    with pytest.raises(PeerLost, match=r"rank 1 .* rank 0 has given up"):
        exchange.set("0/1", b"address")


def test_who_has_come_is_not_blamed_though_another_has_given_up(tmp_path):
    """The first takes with it what all have said."""
    joining = [Task(make_group, tmp_path / "meet", rank, 3, 0.5 + 0.1 * rank) for rank in (0, 2)]
    for task in joining:
        with pytest.raises(DeadlineExceeded, match="in vain for rank 1 at"):
            task.result()


def exchanges(directory: Path, size: int):
    from tpserve.distributed.files import FileExchange

    return [FileExchange(directory / "meet", rank, soon()) for rank in range(size)]


def keys(word: str, size: int) -> list[str]:
    return [f"{word}/{rank}" for rank in range(size)]


def test_who_neither_met_nor_tried_is_the_one_that_others_waited_for(tmp_path):
    first, second, _stopped, third = exchanges(tmp_path, 4)
    third.set("met/3", b"")
    for task in [Task(one.silent, keys("tried", 4), keys("met", 4)) for one in (first, second)]:
        assert task.result() == "rank 2"


def test_those_who_all_tried_blame_nobody(tmp_path):
    asking = [Task(one.silent, keys("tried", 3), keys("met", 3)) for one in exchanges(tmp_path, 3)]
    assert [task.result() for task in asking] == ["the others, who tried too"] * 3


def test_the_last_to_meet_tidies_up(tmp_path):
    """Whoever that is: the first may have been killed."""
    first, second = exchanges(tmp_path, 2)
    first.set("met/0", b"")
    assert second.conclude(keys("met", 2))
    assert list(tmp_path.iterdir()) == []


def test_the_first_learns_that_all_have_met_from_who_tidied_up(tmp_path):
    first, second = exchanges(tmp_path, 2)
    concluding = Task(first.conclude, keys("met", 2))
    assert see_said(tmp_path / "meet" / "met.0")
    assert second.conclude(keys("met", 2))
    assert concluding.result()


def see_said(path: Path) -> bool:
    while not path.exists():
        time.sleep(0.001)
    return True


@contextmanager
def stopped_members(directory: Path):
    """Two members each that one process imitates, the one stopped at a moment, at a path that tells of the other."""
    with subprocess.Popen([sys.executable, STOPPING, directory], stdout=subprocess.PIPE, text=True) as members:
        pids = []
        try:
            cases = []
            for _ in range(10):
                pid, rank, path, can_go_on = members.stdout.readline().split(" ", 3)
                pids.append(int(pid))
                cases.append((int(rank), Path(path), can_go_on.strip() == "True"))
            yield cases
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)


def test_a_member_that_is_stopped_at_any_moment_holds_nobody_up(tmp_path):
    def meets(rank, path, deadline):
        try:
            make_group(path, rank, 2, deadline - time.monotonic())
        except TransportError as error:
            return str(error)
        finally:
            see_soon_after(deadline)
        return None

    with stopped_members(tmp_path) as cases:
        end = time.monotonic() + PATIENCE
        for _, path, _ in cases:
            while not path.exists():
                assert time.monotonic() < end
                time.sleep(0.01)
        deadline = time.monotonic() + 1.5
        meeting = [Task(meets, 1 - rank, path, deadline) for rank, path, _ in cases]
        for task, (rank, path, may_meet) in zip(meeting, cases, strict=True):
            said = task.result()
            assert (said is None and may_meet) or f"rank {rank}" in said, (path.name, said)
