import math

import pytest

from tpserve.api import Announcement, Closed, SyncSpec
from tpserve.plugins.builtin import tpserve_syncs
from tpserve.sync.options import ShmOptions
from tpserve.testing.lab import Task, soon, wake
from tpserve.testing.sync import SyncContract
from tpserve.testing.sync_group import Group


class TestShm(SyncContract):
    @pytest.fixture
    def spec(self) -> SyncSpec:
        return next(spec for spec in tpserve_syncs() if spec.name == "shm")

    def test_closing_wakes_a_waiting_follower(self, group: Group) -> None:
        _leader, follower = group.connected(2)
        assert wake(lambda: follower.receive(math.inf), follower.close)

    def test_a_closed_end_says_so(self, group: Group) -> None:
        leader, follower = group.connected(2)
        for end in (leader, follower):
            end.close()
        with pytest.raises(Closed):
            leader.announce(Announcement(0, 0, 0, -1, 0), soon())
        with pytest.raises(Closed):
            follower.receive(soon())

    @pytest.mark.parametrize("spin", [0, 10_000])
    def test_spinning_or_not_changes_nothing(self, spec: SyncSpec, spin: int) -> None:
        group = Group(spec, ShmOptions(spin=spin), None)
        leader, follower = group.connected(2)
        said = [Announcement(number, number, 1, -1, 0) for number in range(500)]
        hearing = Task(lambda: [follower.receive(soon()) for _ in said])
        for announcement in said:
            leader.announce(announcement, soon())
        assert hearing.result() == said
        group.close()
