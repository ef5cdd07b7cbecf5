"""What an A/B bench may conclude: quantiles, and ratios of two arms with an interval around them.

Samples of one block belong together: whatever the machine was doing then is in all of them. So the bootstrap is
hierarchical, blocks first and then samples within each; and blocks are drawn alike for every arm, because block i of
one arm ran beside block i of the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = ["REPLICATES", "Curve", "Finding", "Ratio", "Statistic", "compare", "curve", "quantile", "replicate"]

REPLICATES = 1000
CONFIDENCE = 0.95
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for 95 % and 1, 2, … degrees of freedom; NORMAL for ever more."""
NORMAL = 1.960
WIDE = 1.5
"""An interval whose ends are further apart than by this factor does not say that there is no difference."""
USELESS = 10
"""An interval whose ends are further apart than by this factor is not told: it is guesswork, as of two blocks."""
FEWEST_BEYOND = 2
"""A quantile is told only if at least so many samples can be expected beyond it."""

Samples = npt.NDArray[np.float64]
Statistic = Callable[[Samples], Samples]
"""From samples to one or more figures."""
Curve = list[tuple[float, float]]
Finding = Literal["less", "more", "no difference", "cannot tell"]


class Ratio(msgspec.Struct, frozen=True):
    """One arm's figure over another's.

    Attributes:
        value: the ratio of the figures as measured.
        low: where the interval begins that holds the true one with 95 % confidence.
        high: where it ends.
    """

    value: float
    low: float
    high: float

    @property
    def verdict(self) -> Finding:
        """What can be said: if the interval includes 1 no difference, or nothing at all if it is wide."""
        if self.low <= 1 <= self.high:
            return "no difference" if self.high <= self.low * WIDE else "cannot tell"
        return "less" if self.high < 1 else "more"

    @property
    def is_difference(self) -> bool:
        """Whether there is one."""
        return self.verdict in ("less", "more")

    def tone(self, *, more_is_better: bool) -> Literal["good", "bad", "quiet"]:
        """Whether it is good news."""
        if not self.is_difference:
            return "quiet"
        return "good" if (self.verdict == "more") == more_is_better else "bad"

    def for_few(self, blocks: int) -> Ratio:
        """Widen the interval by what a bootstrap over so few blocks, at least 2, falls short of Student's t."""
        t = STUDENT[blocks - 2] if blocks - 2 < len(STUDENT) else NORMAL
        factor = t / NORMAL * math.sqrt(blocks / (blocks - 1))
        low, high = (self.value * (edge / self.value) ** factor for edge in (self.low, self.high))
        return Ratio(self.value, low, high)

    def __str__(self) -> str:
        told = f"{self.value:.3g}×" if self.is_difference else self.verdict
        if self.high <= self.low * USELESS:
            return f"{told} ({self.low:.3g} … {self.high:.3g})"
        if not self.is_difference:
            return told
        return f"{told} (at most {self.high:.3g})" if self.high < 1 else f"{told} (at least {self.low:.3g})"


def quantile(samples: Samples, share: float) -> float | None:
    """The value below which this share of the samples lies; None if there are too few to tell."""
    if len(samples) * (1 - share) < FEWEST_BEYOND and share > 0.5:
        return None
    return float(np.quantile(samples, share)) if len(samples) else None


def curve(samples: Samples, points: int = 200) -> Curve:
    """The cumulative distribution as (value, share of samples up to it), denser towards the tail.

    Args:
        samples: at least one.
        points: about how many to keep.
    """
    body = np.linspace(0.0, 0.99, points * 3 // 4)
    tail = 1 - np.geomspace(0.01, 1 / max(100, len(samples)), points - len(body))
    shares = np.unique(np.concatenate([body, tail, [1.0]]))
    values = np.quantile(samples, shares)
    return [(float(value), float(share)) for value, share in zip(values, shares, strict=True)]


def replicate(blocks: Sequence[Samples], statistic: Statistic, *, seed: int, stream: int, replicates: int) -> Samples:
    """What the statistic might have been: its values on samples drawn anew, blocks first.

    Args:
        blocks: the samples of each block.
        statistic: of all samples together.
        seed: the same for all arms that will be compared, so that they draw the same blocks.
        stream: another for each arm, so that they draw samples independently.
        replicates: how many values.

    Returns:
        ``[replicates, figures]``.
    """
    chosen = np.random.default_rng([seed, 0]).integers(len(blocks), size=(replicates, len(blocks)))
    within = np.random.default_rng([seed, 1, stream])
    return np.stack([statistic(_resample([blocks[index] for index in row], within)) for row in chosen])


def compare(measured: tuple[float, float], replicates: tuple[Samples, Samples]) -> Ratio:
    """The second arm's figure over the first's.

    Args:
        measured: the figure of each arm.
        replicates: the replicates of that figure for each arm, ``[replicates]``.
    """
    ratios = replicates[1] / replicates[0]
    margin = (1 - CONFIDENCE) / 2
    low, high = np.quantile(ratios, [margin, 1 - margin])
    return Ratio(measured[1] / measured[0], float(low), float(high))


def _resample(blocks: Sequence[Samples], rng: np.random.Generator) -> Samples:
    return np.concatenate([block[rng.integers(len(block), size=len(block))] for block in blocks])
