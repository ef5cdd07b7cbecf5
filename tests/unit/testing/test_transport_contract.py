"""The transport contract finds transports that break it."""

from pathlib import Path

import pytest

from tpserve.testing import lab, processes

FAULTY = Path(__file__).with_name("faulty_transports.py")


def passes(test: str) -> bool:
    """Run one test of the contract in this process."""
    arguments = ["-q", "--no-header", "-p", "no:cacheprovider", f"{FAULTY}::TestFaulty::{test}"]
    code = pytest.main(arguments)
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), code
    return code == pytest.ExitCode.OK


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("Losing", "test_followers_see_the_same_sequence_however_it_is_cut[1-ipc]"),
        ("Doubling", "test_followers_see_the_same_sequence_however_it_is_cut[1-ipc]"),
        ("Swapping", "test_followers_see_the_same_sequence_however_it_is_cut[1-ipc]"),
        ("Cutting", "test_a_frame_of_64_mb"),
        ("Forgetting", "test_a_sender_far_ahead_waits_until_its_deadline"),
        ("Forgetting", "test_a_sender_goes_on_as_soon_as_it_is_read"),
        ("Hasty", "test_cold_starts"),
        ("Polling", "test_a_waiting_follower_rests"),
        ("Forgetful", "test_a_deadline_loses_no_frame"),
        ("Careless", "test_a_pipe_sender_far_ahead_waits_and_may_try_again"),
        ("Sleepy", "test_closing_wakes_a_waiting_receiver"),
    ],
)
def test_a_broken_promise_is_found(monkeypatch, fault, test):
    for module in (lab, processes):
        monkeypatch.setattr(module, "PATIENCE", 2.0)
    monkeypatch.setenv("FAULT", "Sound")
    assert passes(test)
    monkeypatch.setenv("FAULT", fault)
    assert not passes(test)
