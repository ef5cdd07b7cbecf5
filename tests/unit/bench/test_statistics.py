"""Quantiles and ratios against distributions whose figures are known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tpserve.bench.statistics import Ratio, compare, curve, quantile, replicate

Samples = npt.NDArray[np.float64]


def median(samples: Samples) -> Samples:
    return np.quantile(samples, [0.5])


def ratio(a: list[Samples], b: list[Samples], seed: int = 0, replicates: int = 400) -> Ratio:
    """The second arm's median over the first's."""
    drawn = [
        replicate(blocks, median, seed=seed, stream=stream, replicates=replicates)[:, 0]
        for stream, blocks in enumerate((a, b))
    ]
    figures = [float(np.median(np.concatenate(blocks))) for blocks in (a, b)]
    return compare((figures[0], figures[1]), (drawn[0], drawn[1]))


def test_quantiles_of_a_known_distribution() -> None:
    samples = np.random.default_rng(1).exponential(100.0, 200_000)

    for share in (0.5, 0.9, 0.99, 0.999):
        assert quantile(samples, share) == pytest.approx(-100 * np.log(1 - share), rel=0.05)


@pytest.mark.parametrize(
    ("samples", "share", "is_told"), [(199, 0.99, False), (200, 0.99, True), (1999, 0.999, False), (1, 0.5, True)]
)
def test_a_quantile_with_next_to_no_samples_beyond_it_is_not_told(samples: int, share: float, is_told: bool) -> None:
    assert (quantile(np.arange(samples, dtype=np.float64), share) is not None) is is_told


def test_a_curve_rises_from_the_least_to_the_greatest() -> None:
    samples = np.random.default_rng(2).lognormal(4, 1, 5000)
    values, shares = zip(*curve(samples), strict=True)

    assert list(values) == sorted(values)
    assert list(shares) == sorted(set(shares))
    assert (values[0], values[-1]) == (samples.min(), samples.max())
    assert (shares[0], shares[-1]) == (0, 1)
    assert np.interp(0.5, shares, values) == pytest.approx(np.median(samples), rel=0.01)


def test_a_true_ratio_is_found_and_lies_in_its_interval() -> None:
    rng = np.random.default_rng(3)
    a = [rng.lognormal(4, 0.3, 500) for _ in range(10)]
    b = [0.4 * rng.lognormal(4, 0.3, 500) for _ in range(10)]
    found = ratio(a, b)

    assert found.low < 0.4 < found.high
    assert found.value == pytest.approx(0.4, rel=0.05)
    assert found.verdict == "less"
    assert ratio(b, a).verdict == "more"
    assert "0.4" in str(found)


def test_no_difference_is_said_to_be_none() -> None:
    """95 % of the intervals should hold 1, whatever the blocks have in common."""
    rng = np.random.default_rng(4)
    verdicts = []
    for trial in range(40):
        drift = rng.lognormal(0, 0.3, 10)
        a, b = ([shift * rng.lognormal(4, 0.3, 100) for shift in drift] for _ in "ab")
        verdicts.append(ratio(a, b, seed=trial, replicates=200).verdict)

    assert verdicts.count("no difference") >= 35
    assert str(Ratio(1.1, 0.9, 1.3)) == "no difference (0.9 … 1.3)"


def test_a_wide_interval_tells_nothing() -> None:
    """As of two blocks: that 1 lies in it does not make the arms equal."""
    found = Ratio(0.3, 1e-8, 240.0)

    assert found.verdict == "cannot tell"
    assert str(found) == "cannot tell"
    assert found.tone(more_is_better=True) == "quiet"
    assert str(Ratio(1.1, 0.6, 2.0)) == "cannot tell (0.6 … 2)"


def test_of_a_wide_interval_only_the_end_is_told_that_shows_the_difference() -> None:
    assert str(Ratio(0.1, 4.8e-15, 0.3)) == "0.1× (at most 0.3)"
    assert str(Ratio(10.0, 3.0, 6.43e8)) == "10× (at least 3)"
    assert str(Ratio(0.1, 0.05, 0.3)) == "0.1× (0.05 … 0.3)"


def test_blocks_that_differ_widen_the_interval() -> None:
    """Samples of one block are no independent evidence: what distinguishes blocks must show in the interval."""
    rng = np.random.default_rng(5)
    steady = [rng.lognormal(4, 0.3, 500) for _ in range(10)]
    moody = [rng.lognormal(0, 0.3) * rng.lognormal(4, 0.3, 500) for _ in range(10)]

    def width(found: Ratio) -> float:
        return float(np.log(found.high / found.low))

    assert width(ratio(steady, moody)) > 3 * width(ratio(steady, steady))


def test_what_blocks_have_in_common_cancels() -> None:
    rng = np.random.default_rng(6)
    drift = rng.lognormal(0, 0.5, 10)
    a, b = ([shift * rng.lognormal(4, 0.1, 300) for shift in drift] for _ in "ab")
    elsewhere = [shift * rng.lognormal(4, 0.1, 300) for shift in rng.permutation(drift)]

    assert ratio(a, b).high / ratio(a, b).low < 0.7 * ratio(a, elsewhere).high / ratio(a, elsewhere).low


def test_the_same_seed_gives_the_same_interval() -> None:
    blocks = [np.random.default_rng(7).lognormal(4, 1, 50) for _ in range(4)]

    first = replicate(blocks, median, seed=1, stream=0, replicates=20)
    assert np.array_equal(first, replicate(blocks, median, seed=1, stream=0, replicates=20))
    assert not np.array_equal(first, replicate(blocks, median, seed=1, stream=1, replicates=20))
    assert not np.array_equal(first, replicate(blocks, median, seed=2, stream=0, replicates=20))


def test_good_news_is_less_of_a_latency_and_more_of_a_throughput() -> None:
    assert Ratio(0.5, 0.4, 0.6).tone(more_is_better=False) == "good"
    assert Ratio(0.5, 0.4, 0.6).tone(more_is_better=True) == "bad"
    assert Ratio(1.1, 0.9, 1.3).tone(more_is_better=True) == "quiet"


def test_few_blocks_widen_an_interval_on_both_sides_and_many_do_not() -> None:
    ratio = Ratio(2.0, 1.0, 4.0)

    assert ratio.for_few(5).high == pytest.approx(2 * 2 ** (2.776 / 1.96 * (5 / 4) ** 0.5))
    assert ratio.for_few(5).low == pytest.approx(4 / ratio.for_few(5).high)
    assert ratio.for_few(10_000).high == pytest.approx(4, rel=1e-3)
    assert ratio.for_few(2).high > ratio.for_few(3).high > ratio.for_few(17).high > 4


def test_three_blocks_of_one_figure_each_seldom_tell_equal_arms_apart() -> None:
    rng = np.random.default_rng(5)
    found = []
    for seed in range(100):
        a, b = ([np.exp(0.1 * rng.normal(size=1)) for _ in range(3)] for _ in range(2))
        found.append(ratio(a, b, seed, replicates=100))

    assert sum(ratio.is_difference for ratio in found) > 10
    assert sum(ratio.for_few(3).is_difference for ratio in found) <= 5
