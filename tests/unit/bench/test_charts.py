from __future__ import annotations

import pytest

from tpserve.bench.charts import FURTHEST, STYLES, Interval, intervals, log_axis, style_of


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (1, 1000, ["1", "10", "100", "1k"]),
        (90, 210, ["90", "100", "200"]),
        (9.99, 10.3, None),
        (3.5e3, 3.6e3, None),
        (5.0, 5.0, None),
    ],
)
def test_an_axis_has_at_least_two_ticks_and_holds_all_values(low: float, high: float, labels: list[str] | None) -> None:
    axis = log_axis([low, high], "what", most=5)

    assert len(axis.ticks) >= 2
    assert all(-0.02 <= axis.place(value) <= 1.02 for value, _ in axis.ticks)
    assert 0 <= axis.place(low) <= axis.place(high) <= 1
    assert labels in (None, [text for _, text in axis.ticks])


def test_only_the_baseline_is_grey() -> None:
    assert [style_of(place) for place in range(STYLES + 2)] == [*range(STYLES), 1, 2]


def test_an_interval_that_tells_nothing_leaves_the_others_room() -> None:
    absurd = Interval("x", 1, 1.0, 1e-15, 1e15, "cannot tell", "quiet")
    cut = Interval("x", 1, 1.0, 1 / FURTHEST, FURTHEST, "cannot tell", "quiet")

    assert intervals([absurd], "ratio") == intervals([cut], "ratio")
