"""Who leads at an address: one living leader at a time, and never at somebody else's file."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Barrier, Thread

import pytest

from tpserve.api import TransportError
from tpserve.transports.claim import Claim, Visit, join_leader


def visit(path: Path, follower: int, name: bytes) -> Visit:
    visit = join_leader(path, follower, name)
    assert visit is not None
    return visit


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_followers_find_where_a_living_leader_meets_them(tmp_path: Path) -> None:
    path = tmp_path / "link"
    assert join_leader(path, 0, b"a") is None

    claim = Claim(path)

    visits = [visit(path, *who) for who in ((0, b"a"), (1, b"b"))]
    assert [one.meeting for one in visits] == [claim.meeting] * 2
    assert claim.came() == [0, 1]
    with pytest.raises(TransportError, match="has a follower 1 already"):
        join_leader(path, 1, b"c")
    assert not visits[0].has_lost_leader()
    claim.close()
    assert visits[0].has_lost_leader()
    assert join_leader(path, 0, b"a") is None
    assert list(tmp_path.iterdir()) == []
    for one in visits:
        one.close()


def test_a_leader_sees_which_follower_has_gone(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "link")
    first, second = (visit(tmp_path / "link", follower, b"%d" % follower) for follower in range(2))
    assert [claim.has_lost(follower) for follower in range(2)] == [False, False]
    second.close()
    assert [claim.has_lost(follower) for follower in range(2)] == [False, True]
    first.close()
    claim.close()


def test_one_living_leader_is_enough(tmp_path: Path) -> None:
    claim = Claim(tmp_path / "link")

    with pytest.raises(TransportError, match="has a leader already"):
        Claim(tmp_path / "link")

    follower = visit(tmp_path / "link", 0, b"a")
    assert follower.meeting == claim.meeting
    follower.close()
    claim.close()


def test_what_a_killed_leader_left_is_no_leader_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "link"
    killed = Claim(path)
    killed.meeting.mkdir()
    (killed.meeting / "came.0").touch()
    os.close(killed._descriptor)

    assert join_leader(path, 0, b"a") is None
    claim = Claim(path)

    assert claim.meeting != killed.meeting
    assert sorted(tmp_path.iterdir()) == [path]
    claim.close()


def test_of_many_in_the_same_instant_one_leads(tmp_path: Path) -> None:
    path = tmp_path / "link"
    for _ in range(20):
        os.close(Claim(path)._descriptor)
        claims: list[Claim] = []
        together = Barrier(4)

        def lead(together: Barrier = together, claims: list[Claim] = claims) -> None:
            together.wait()
            try:
                claims.append(Claim(path))
            except TransportError:
                return

        threads = [Thread(target=lead) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (claim,) = claims
        claim.close()


LEADERS = b"tpserve gloo fan-out 1\n"


@pytest.mark.parametrize(
    "content",
    [b"", b"notes\n", LEADERS + b"../notes\n", LEADERS + b"link./notes\n", LEADERS + b"link.\0\n"],
)
def test_somebody_elses_file_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "link"
    path.write_bytes(content)
    before = open_files()

    for use in (lambda: Claim(path), lambda: join_leader(path, 0, b"a")):
        with pytest.raises(TransportError, match="no leader's"):
            use()

    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
    assert open_files() == before


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    before = open_files()

    for name in (".", "fifo", "link"):
        with pytest.raises(TransportError):
            Claim(tmp_path / name)

    assert open_files() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "link"]
