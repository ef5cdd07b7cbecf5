"""The comm contract finds comms that break it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.testing.finding import finds

from tpserve.testing import comm

FAULTY = Path(__file__).with_name("faulty_comms.py")


@pytest.mark.parametrize(
    ("fault", "test"),
    [
        ("Uneven", "test_all_reduce_sums_and_ends_with_the_same_bits[2-torch.float32]"),
        ("Coarse", "test_min_is_exact_in_64_bits"),
        ("Backwards", "test_all_gather_puts_ranks_side_by_side[2]"),
        ("Inferring", "test_empty_tensors[0-5]"),
        ("Copying", "test_broadcast_replaces_in_place[0]"),
        ("Patient", "test_a_silent_peer_is_an_error_at_the_timeout"),
        ("Steadfast", "test_a_missing_rank_is_an_error_on_joining[0]"),
        ("Open", "test_groups_close_twice_and_are_then_closed"),
    ],
)
def test_a_broken_promise_is_found(fault: str, test: str) -> None:
    assert finds(FAULTY, fault, test, 2.0, comm)
