"""What of a rank's state must be the same on all of them after each round."""

from __future__ import annotations

from tpserve.scheduler.digest import DecisionLog
from tpserve.scheduler.scheduler import Scheduler

__all__ = ["FULL", "NUMBERS", "State", "difference", "state_of"]

FULL = 64
"""So often, in rounds, everything is looked at."""

State = tuple[object, ...]

NUMBERS = 9
"""So many of a state's items, the first, are those of every round."""

NAMES = (
    *("latest digest", "changes of the cache", "available pages", "free pages", "promised pages"),
    *(
        "running",
        "decoding",
        "waiting",
        "last pages",
        "requests",
        "their pages",
        "who decodes",
        "free pages in order",
        "cache",
    ),
)


def state_of(scheduler: Scheduler, log: DecisionLog, round: int) -> State:
    """The state after a round: numbers that would hardly be equal by chance, and now and then everything.

    Raises:
        AssertionError: it is not whole.
    """
    queues, capacity = scheduler.queues, scheduler.capacity
    pool = capacity.pool
    capacity.check_counts(queues.running.values())
    numbers = (
        log.latest,
        pool.version,
        pool.available,
        pool._pages.free_count,
        capacity.promised,
        len(queues.running),
        len(queues.decoding),
        queues.num_waiting,
        [each.holding.pages[-1:] for each in queues.running.values() if each.holding],
    )
    if round % FULL != FULL - 1:
        return numbers
    scheduler.check()
    return (*numbers, *_everything(scheduler))


def difference(found: State, expected: State) -> str:
    """The first thing in which two states differ."""
    pairs = zip(NAMES, found, expected, strict=False)
    return next(f"{name}: {a}, the leader {b}" for name, a, b in pairs if a != b)


def _everything(scheduler: Scheduler) -> State:
    queues, pool = scheduler.queues, scheduler.capacity.pool
    return (
        [(each.uid, each.slot, each.known, each.length, each.peeked, each.tokens.tolist()) for each in queues],
        [each.holding and each.holding.pages.copy() for each in queues],
        list(queues.decoding),
        pool._pages._stack.copy(),
        [(node.key, node.pages.copy(), node.locks, node.stamp) for node in pool._tree.nodes()],
    )
