"""The decision digest: equal decisions, equal digests; and where two ranks first differ."""

import msgspec
import pytest

from tpserve.errors import Divergence, RankError
from tpserve.scheduler.digest import WINDOW, DecisionLog, RoundDecisions, dump_path, first_difference, report

ROUND = RoundDecisions(uids=[7, 9], pages=[[1, 2], []], lengths=[20, 5], tokens=[11, -1], finished=[None, "stop"])
OTHERS = {
    "uids": [9, 7],
    "pages": [[1], [2]],
    "lengths": [20, 6],
    "tokens": [11, 0],
    "finished": [None, "length"],
}


def log_of(*rounds: RoundDecisions, rank: int = 0) -> DecisionLog:
    log = DecisionLog(rank)
    for number, decisions in enumerate(rounds):
        log.fold(number, decisions)
    return log


def changed(field: str) -> RoundDecisions:
    return msgspec.structs.replace(ROUND, **{field: OTHERS[field]})


def test_nothing_is_finished_at_first():
    assert DecisionLog(0).latest == (-1, 0)


def test_equal_decisions_have_equal_digests():
    assert log_of(ROUND, ROUND).latest == log_of(ROUND, ROUND, rank=3).latest


@pytest.mark.parametrize("field", OTHERS)
def test_every_decision_counts(field):
    assert log_of(ROUND).latest != log_of(changed(field)).latest


def test_a_difference_lasts():
    assert log_of(changed("tokens"), ROUND, ROUND).latest != log_of(ROUND, ROUND, ROUND).latest


def test_an_empty_round_counts():
    assert log_of(RoundDecisions()).latest != log_of(RoundDecisions(), RoundDecisions()).latest


def test_digests_fit_into_signed_64_bit():
    digests = [log_of(*[ROUND] * count).latest[1] for count in range(1, 40)]
    assert all(-(1 << 63) <= digest < 1 << 63 for digest in digests)
    assert min(digests) < 0 < max(digests)


def test_rounds_are_folded_in_order():
    with pytest.raises(AssertionError):
        DecisionLog(0).fold(1, ROUND)


def test_a_digest_is_compared_when_its_round_is_finished():
    leader, follower = log_of(ROUND, ROUND), DecisionLog(1)
    follower.expect(*leader.latest)
    follower.fold(0, ROUND)
    follower.fold(1, ROUND)
    follower.expect(*leader.latest)


def test_a_divergence_names_rank_and_round():
    follower = DecisionLog(2)
    follower.expect(*log_of(ROUND, ROUND).latest)
    follower.fold(0, ROUND)
    with pytest.raises(Divergence, match="rank 2, round 1: expected the leader's digest") as caught:
        follower.fold(1, changed("lengths"))
    assert (caught.value.rank, caught.value.round) == (2, 1)


def test_a_divergence_of_a_finished_round_is_noticed_at_once():
    follower = log_of(changed("pages"), rank=1)
    with pytest.raises(Divergence):
        follower.expect(*log_of(ROUND).latest)


def test_nothing_is_expected_before_the_first_round():
    DecisionLog(1).expect(-1, 0)


def test_a_digest_from_long_ago_is_an_error():
    follower = log_of(*[ROUND] * (WINDOW + 1))
    follower.expect(1, log_of(ROUND, ROUND).latest[1])
    with pytest.raises(RankError, match="last 64 rounds"):
        follower.expect(0, log_of(ROUND).latest[1])


@pytest.mark.parametrize(
    ("field", "decision", "found"),
    [
        ("uids", "uids[0]", "rank 0 has 7, rank 1 has 9"),
        ("pages", "pages[0] of request 7", "rank 0 has [1, 2], rank 1 has [1]"),
        ("lengths", "lengths[1] of request 9", "rank 0 has 5, rank 1 has 6"),
        ("tokens", "tokens[1] of request 9", "rank 0 has -1, rank 1 has 0"),
        ("finished", "finished[1] of request 9", "rank 0 has stop, rank 1 has length"),
    ],
)
def test_two_dumps_show_the_first_decision_that_differs(tmp_path, field, decision, found):
    log_of(ROUND, ROUND, ROUND).dump(tmp_path / "a")
    log_of(ROUND, changed(field), ROUND, rank=1).dump(tmp_path / "b")
    difference = first_difference(tmp_path / "a", tmp_path / "b")
    assert str(difference) == f"round 1: {decision} differs: {found}"


def test_a_shorter_batch_differs_in_what_is_missing(tmp_path):
    log_of(ROUND).dump(tmp_path / "a")
    log_of(RoundDecisions(uids=[7]), rank=1).dump(tmp_path / "b")
    difference = first_difference(tmp_path / "a", tmp_path / "b")
    assert difference is not None
    assert (difference.decision, difference.found) == ("uids[1]", (9, "nothing"))


def test_equal_dumps_show_no_difference(tmp_path):
    log_of(ROUND, ROUND).dump(tmp_path / "a")
    log_of(ROUND, rank=1).dump(tmp_path / "b")
    assert first_difference(tmp_path / "a", tmp_path / "b") is None


def test_a_difference_older_than_what_is_kept_is_said_to_be(tmp_path):
    log_of(ROUND, *[ROUND] * WINDOW).dump(tmp_path / "a")
    log_of(changed("tokens"), *[ROUND] * WINDOW, rank=1).dump(tmp_path / "b")
    difference = first_difference(tmp_path / "a", tmp_path / "b")
    assert difference is not None
    assert (difference.round, difference.decision) == (1, "a decision before the rounds that were kept")


def test_a_dump_keeps_the_last_64_rounds(tmp_path):
    log_of(*[ROUND] * 100).dump(tmp_path / "a")
    dumped = msgspec.json.decode((tmp_path / "a").read_bytes())
    assert [entry["round"] for entry in dumped["rounds"]] == list(range(36, 100))


def test_a_dump_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    log_of(ROUND).dump(tmp_path / "nowhere" / "a")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.exc_info is None
    assert "No such file or directory" in record.message


def test_a_report_compares_all_ranks_with_the_leader(tmp_path):
    assert report(tmp_path) == []
    for rank, decisions in enumerate([ROUND, ROUND, changed("tokens")]):
        log_of(decisions, rank=rank).dump(dump_path(tmp_path, rank))
    assert report(tmp_path) == ["round 0: tokens[1] of request 9 differs: rank 0 has -1, rank 2 has 0"]


def test_a_round_that_is_not_finished_is_compared_as_far_as_it_is_decided(tmp_path):
    begun = RoundDecisions(uids=[7], pages=[[3]], lengths=[21], tokens=[-1], finished=[None])
    other = msgspec.structs.replace(begun, lengths=[20])
    finished = msgspec.structs.replace(begun, tokens=[5], finished=["stop"])
    log_of(ROUND).dump(tmp_path / "a", {0: other, 1: begun})
    log_of(ROUND, finished, rank=1).dump(tmp_path / "b")
    assert first_difference(tmp_path / "a", tmp_path / "b") is None
    log_of(ROUND, rank=1).dump(tmp_path / "b", {1: other})
    assert str(first_difference(tmp_path / "a", tmp_path / "b")) == (
        "round 1: lengths[0] of request 7 differs: rank 0 has 21, rank 1 has 20"
    )
