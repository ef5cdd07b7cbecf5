from __future__ import annotations

from tpserve.frontend.prometheus import Counter, Gauge, Histogram, render


def test_a_metric_is_written_with_its_help_and_type() -> None:
    gauge = Gauge("up", "Whether it is up.", {"name": 'a "b"\\\n'})
    gauge.value += 2

    text = render([gauge, Counter("n_total", "Some.")]).decode()
    assert text == (
        "# HELP up Whether it is up.\n# TYPE up gauge\n"
        r'up{name="a \"b\"\\\n"} 2'
        "\n\n# HELP n_total Some.\n# TYPE n_total counter\nn_total 0\n"
    )


def test_a_counter_has_a_sample_for_each_value_of_its_label() -> None:
    counter = Counter("n_total", "Some.", "kind", ("a", "b"))
    counter.add(3, "b")
    counter.add(1, "b")

    assert list(counter.lines()) == ['n_total{kind="a"} 0', 'n_total{kind="b"} 4']


def test_buckets_are_cumulative_and_hold_their_bounds() -> None:
    histogram = Histogram("seconds", "How long.", (0.5, 1.0, 2.0))
    for value in (0.5, 0.75, 1.0, 3.0):
        histogram.observe(value)

    assert list(histogram.lines()) == [
        'seconds_bucket{le="0.5"} 1',
        'seconds_bucket{le="1.0"} 3',
        'seconds_bucket{le="2.0"} 3',
        'seconds_bucket{le="+Inf"} 4',
        "seconds_sum 5.25",
        "seconds_count 4",
    ]
