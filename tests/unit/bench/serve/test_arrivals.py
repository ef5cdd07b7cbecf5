from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tpserve.bench.serve.arrivals import arrival_times, read_rates
from tpserve.errors import ConfigError


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_as_mean_and_vary_as_the_burstiness_says(burstiness: float) -> None:
    times = arrival_times(20_001, 5.0, burstiness, Random(3))
    gaps = np.diff(times)

    assert times[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_arrivals_are_a_function_of_the_seed() -> None:
    first, again, other = (arrival_times(10, 5.0, 1.0, Random(seed)) for seed in (1, 1, 2))

    assert first == again != other
    assert arrival_times(3, None, 1.0, Random(1)) == [0, 0, 0]


def test_rates_are_read_once_each_and_in_order() -> None:
    assert read_rates("2,0.5, inf,2") == [2.0, 0.5, None]
    for text in ("", "fast", "0", "1,-2", "nan"):
        with pytest.raises(ConfigError, match="--request-rate"):
            read_rates(text)
