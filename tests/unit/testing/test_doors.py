"""The contracts find what lets strangers at its door, or one who was stopped, hold others up."""

from pathlib import Path

import pytest
from tests.unit.testing.finding import passes

from tpserve.testing import lab

FAULTY = Path(__file__).with_name("faulty_doors.py")
HELD_UP = "test_a_silent_stranger_holds_no_{}_up"
LEADER = "test_a_leader_with_a_silent_stranger_keeps_its_deadline"
FOLLOWER = "test_a_follower_that_is_not_let_in_keeps_its_deadline"
STOPPED = "test_a_rank_that_is_stopped_on_joining_holds_nobody_up[{}]"
TOO_LONG = "test_an_address_that_is_too_long_is_an_error_at_both_ends"


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("Trusting", HELD_UP.format("follower")),
        ("Trusting", LEADER),
        ("Queueing", FOLLOWER),
        ("Queueing", TOO_LONG),
        ("Hoping", TOO_LONG),
    ],
)
def test_a_transport_that_strangers_hold_up_is_found(monkeypatch, fault, test):
    finds(monkeypatch, fault, test)


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("Trusting", HELD_UP.format("rank")),
        ("Trusting", LEADER),
        ("Littering", LEADER),
        ("Queueing", STOPPED.format(0)),
        ("Locking", STOPPED.format(0)),
        ("Locking", STOPPED.format(1)),
        ("Patient", STOPPED.format(0)),
    ],
)
def test_a_sync_that_others_hold_up_is_found(monkeypatch, fault, test):
    finds(monkeypatch, fault, test, "Sync")


def finds(patch, fault, test, kind=""):
    assert passes(FAULTY, "Sound", test, f"TestFaulty{kind}")
    patch.setattr(lab, "PATIENCE", 1.0)
    assert not passes(FAULTY, fault, test, f"TestFaulty{kind}")
