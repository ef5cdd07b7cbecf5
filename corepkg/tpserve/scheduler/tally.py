"""What clients hear of the KV pool, beside their answers."""

from __future__ import annotations

from tpserve.kv.pool import KvPool
from tpserve.messages import PoolReport

__all__ = ["PoolTally"]


class PoolTally:
    """Reports of one rank's pool, each since the one before.

    Args:
        pool: what is reported on.

    Attributes:
        retractions: how often a running request had to give its pages up so far; for the scheduler to count.
    """

    def __init__(self, pool: KvPool) -> None:
        self.retractions = 0
        self._pool = pool
        self._told = PoolReport(0, 0, 0, 0, 0.0)

    def report(self) -> PoolReport | None:
        """What is new; None if nothing is."""
        pool, told = self._pool, self._told
        seen = pool.counters
        usage = 1 - pool.available / pool.total
        now = self._told = PoolReport(self.retractions, seen.looked_up, seen.found, seen.evicted, usage)
        if now == told:
            return None
        return PoolReport(
            now.retractions - told.retractions,
            now.looked_up - told.looked_up,
            now.found - told.found,
            now.evicted - told.evicted,
            usage,
        )
