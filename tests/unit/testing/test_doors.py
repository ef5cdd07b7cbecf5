"""The contracts find what lets strangers at its door, or one who was stopped, hold others up."""

from functools import cache
from pathlib import Path

import pytest
from tests.unit.testing.finding import passes

from tpserve.testing import lab

FAULTY = Path(__file__).with_name("faulty_doors.py")
FOLLOWER_HELD_UP = "test_strangers_hold_no_follower_up[ipc]"
SENDER_HELD_UP = "test_strangers_hold_no_sender_up[ipc]"
RANK_HELD_UP = "test_strangers_hold_no_rank_up"
LEADER = "test_a_leader_with_a_silent_stranger_keeps_its_deadline"
FOLLOWER = "test_a_follower_that_is_not_let_in_keeps_its_deadline"
STOPPED = "test_a_rank_that_is_stopped_on_joining_holds_nobody_up[{}]"
TOO_LONG = "test_an_address_that_is_too_long_is_an_error_at_both_ends[160]"


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("Trusting", FOLLOWER_HELD_UP),
        ("Believing", FOLLOWER_HELD_UP),
        ("Gullible", FOLLOWER_HELD_UP),
        ("Bare", FOLLOWER_HELD_UP),
        ("Touchy", FOLLOWER_HELD_UP),
        ("Curious", FOLLOWER_HELD_UP),
        ("Trusting", LEADER),
        ("Queueing", FOLLOWER),
        ("Queueing", TOO_LONG),
        ("Hoping", TOO_LONG),
    ],
)
def test_a_transport_that_strangers_hold_up_is_found(monkeypatch, fault, test):
    finds(monkeypatch, fault, test)


def test_a_pipe_that_strangers_hold_up_is_found(monkeypatch):
    finds(monkeypatch, "Curious", SENDER_HELD_UP, "Pipes")


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("Trusting", RANK_HELD_UP),
        ("Gullible", RANK_HELD_UP),
        ("Touchy", RANK_HELD_UP),
        ("Half", RANK_HELD_UP),
        ("Bare", RANK_HELD_UP),
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


@cache
def passes_sound(test, kind):
    return passes(FAULTY, "Sound", test, f"TestFaulty{kind}")


def finds(patch, fault, test, kind=""):
    assert passes_sound(test, kind)
    patch.setattr(lab, "PATIENCE", 1.0)
    assert not passes(FAULTY, fault, test, f"TestFaulty{kind}")
