"""The transport contract finds transports that break it between processes."""

from pathlib import Path

import pytest
from tests.unit.testing.finding import finds

from tpserve.testing import lab, processes

BETWEEN = Path(__file__).with_name("faulty_zmq.py")


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("Dropping", "test_a_stopped_follower_gets_a_burst_later"),
        ("Dropping", "test_a_stopped_receiver_gets_a_burst_later"),
        ("Hoarding", "test_a_stopped_follower_gets_a_burst_later"),
        ("Racing", "test_a_sender_goes_on_as_soon_as_it_is_read"),
        ("OneSided", "test_a_sender_far_ahead_waits_until_its_deadline"),
        ("FrameBound", "test_a_sender_of_large_frames_waits_too"),
        ("FrameBound", "test_a_pipe_sender_of_large_frames_waits_too"),
        ("Narrow", "test_a_killed_follower_is_an_error_though_another_stands_still[0]"),
        ("Narrow", "test_a_killed_follower_is_an_error_though_another_stands_still[1]"),
        ("Uncounting", "test_a_sender_of_empty_frames_waits_too"),
        ("Slow", "test_a_killed_follower_is_an_error_at_the_leader"),
        ("Swallowing", "test_a_killed_follower_is_an_error_at_the_next_send"),
        ("Leaking", "test_closing_leaves_no_file_and_no_descriptor"),
        ("Locking", "test_an_end_that_is_stopped_on_joining_holds_nobody_up[follower]"),
        ("PatientFollowing", "test_an_end_that_is_stopped_on_joining_holds_nobody_up[leader]"),
        ("PatientLeading", "test_an_end_that_is_stopped_on_joining_holds_nobody_up[follower]"),
        ("Parsing", "test_a_malformed_address_is_an_error[tcp://host:x]"),
    ],
)
def test_a_broken_promise_between_processes_is_found(monkeypatch, fault, test):
    monkeypatch.setattr(lab, "NOTICE", 1.5)
    assert finds(BETWEEN, fault, test, 10.0, lab, processes)
