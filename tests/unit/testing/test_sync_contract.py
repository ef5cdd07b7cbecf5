"""The sync contract finds syncs that break it."""

from pathlib import Path

import pytest
import torch  # noqa: F401 it takes longer to import than the tests' patience, which is cut short below
from tests.unit.testing.finding import finds

from tpserve.testing import lab, processes

FAULTY = Path(__file__).with_name("faulty_syncs.py")


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("Losing", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("SeldomLosing", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("SeldomShort", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("OpenAtLast", "test_a_barrier_holds_until_all_are_there[0]"),
        ("Patient", "test_a_rank_that_has_gone_is_an_error_at_the_barrier[0]"),
        ("Patient", "test_a_rank_that_has_gone_is_an_error_at_the_barrier[1]"),
        ("Narrow", "test_a_follower_that_closes_is_an_error_at_the_leader[2]"),
        ("Repeating", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("Babbling", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("RepeatingToMany", "test_every_follower_hears_every_announcement_in_order[3]"),
        ("ShortRound", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("ShortFirstFrame", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("ShortCount", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("ShortDigestRound", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("ShortDigest", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("Silent", "test_every_follower_hears_every_announcement_in_order[2]"),
        ("Stinting", "test_the_frames_of_a_round_follow_its_announcement"),
        ("Frameless", "test_the_frames_of_a_round_follow_its_announcement"),
        ("Frameless", "test_rounds_are_the_same_for_every_rank"),
        ("Generous", "test_the_frames_of_a_round_follow_its_announcement"),
        ("Racing", "test_a_leader_goes_on_as_soon_as_it_is_heard"),
        ("OneSided", "test_a_leader_far_ahead_waits_until_its_deadline"),
        ("Polling", "test_a_leader_goes_on_as_soon_as_it_is_heard"),
        ("Restless", "test_a_missing_rank_is_an_error_on_joining"),
        ("Waiting", "test_the_leader_does_not_wait_for_a_follower_that_is_not_yet_there"),
        ("Open", "test_a_barrier_holds_until_all_are_there[0]"),
        ("Abrupt", "test_a_leader_that_closes_delivers_first"),
        ("Leaking", "test_closing_twice_leaves_no_file_and_no_descriptor"),
        ("Slow", "test_a_killed_leader_is_an_error_at_the_follower"),
        ("Slow", "test_a_killed_follower_is_an_error_at_the_leader"),
        ("Swallowing", "test_a_killed_follower_is_an_error_at_the_next_announcement"),
        ("Late", "test_a_silent_leader_is_an_error_at_the_deadline"),
        ("Late", "test_a_barrier_ends_at_its_deadline"),
        ("Credulous", "test_an_announcement_that_somebody_meddles_with_is_an_error[damages]"),
        ("Credulous", "test_an_announcement_that_somebody_meddles_with_is_an_error[loses]"),
        ("Credulous", "test_an_announcement_that_somebody_meddles_with_is_an_error[repeats]"),
    ],
)
def test_a_broken_promise_is_found(monkeypatch, fault, test):
    monkeypatch.setattr(lab, "NOTICE", 1.5)
    assert finds(FAULTY, fault, test, 5.0, lab, processes)
