"""What goes wrong, once in a simulation: with a frame, an announcement, a rank, or a decision."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Generic, Literal, Protocol, TypeVar, get_args

import msgspec

from tpserve.api import Announcement, Plan, Policy, QueueView, RunningRequest

__all__ = [
    *("Deviant", "Fault", "Meddler", "PageSwapper", "Retractor", "Stopper", "Striker"),
    *("corrupt_announcement", "corrupt_frame", "must_be_noticed"),
]

T = TypeVar("T")

Way = Literal["lost", "duplicated", "corrupted", "reordered"]
Place = Literal["intake", "frame", "announcement", "stop", "plan", "pages", "retraction"]


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong.

    Attributes:
        where: ``intake``: a frame from a tokenizer; ``frame``, ``announcement``: one from the leader to a follower;
            ``stop``: a rank does nothing more; ``plan``: a follower leaves a prompt out; ``pages``: it gives others;
            ``retraction``: it takes pages from another request.
        way: what happens to a frame or an announcement.
        rank: whose; 0 for ``intake``.
        after: so many frames, announcements or rounds pass before.
        bits: says how something is corrupted.
    """

    where: Place
    way: Way
    rank: int
    after: int
    bits: int

    @classmethod
    def draw(cls, draw: Random, followers: int) -> Fault:
        """Any."""
        where = draw.choice(get_args(Place))
        lowest = 0 if where == "stop" else 1
        return cls(
            where=where,
            way=draw.choice(get_args(Way)),
            rank=0 if where == "intake" else draw.randint(lowest, followers),
            after=draw.randrange(draw.choice([3, 12, 60])),
            bits=draw.getrandbits(16),
        )

    @property
    def name(self) -> str:
        """What happens to what."""
        return f"{self.where} {self.way}" if self.where in {"intake", "frame", "announcement"} else self.where

    def may_stop(self, rank: int) -> bool:
        """Whether this rank may be the first to notice."""
        if self.where == "stop":
            return rank == 0 if self.rank else rank > 0
        return self.where == "intake" or rank == self.rank


class Striker(Protocol):
    """Makes something go wrong."""

    has_struck: bool


class Meddler(Generic[T]):
    """Lets items pass, all but one.

    Attributes:
        has_struck: it has happened.
        struck: to this item.
    """

    def __init__(self, fault: Fault, corrupt: Callable[[T, int], T]) -> None:
        self.has_struck = False
        self.struck: T | None = None
        self._fault = fault
        self._corrupt = corrupt
        self._left = fault.after
        self._held: list[T] = []

    def __call__(self, item: T) -> list[T]:
        """What arrives when this item is sent."""
        if self.has_struck:
            items, self._held = [item, *self._held], []
            return items
        self._left -= 1
        if self._left >= 0:
            return [item]
        self.has_struck = True
        self.struck = item
        match self._fault.way:
            case "lost":
                return []
            case "duplicated":
                return [item, item]
            case "corrupted":
                return [self._corrupt(item, self._fault.bits)]
            case "reordered":
                self._held = [item]
                return []


def corrupt_frame(frame: bytes, bits: int) -> bytes:
    """Turn a bit over."""
    index = bits % (8 * len(frame))
    return frame[: index // 8] + bytes([frame[index // 8] ^ 1 << index % 8]) + frame[index // 8 + 1 :]


def corrupt_announcement(announcement: Announcement, bits: int) -> Announcement:
    """Turn one of the lower bits of a number over."""
    field = _field(bits)
    value = getattr(announcement, field) ^ 1 << bits // 5 % 8
    return msgspec.structs.replace(announcement, **{field: value})


def must_be_noticed(fault: Fault, announcement: Announcement) -> bool:
    """Whether no follower may go on after this happens to an announcement.

    A sign of life may be missing or come twice, and of a digest that is turned into that of a round to come nothing is
    known; but which round is meant, where it begins and how long it is, a follower always knows better.
    """
    if fault.way == "corrupted":
        return _field(fault.bits) in {"round", "first_frame", "count"}
    return not announcement.is_heartbeat


def _field(bits: int) -> str:
    return Announcement.__struct_fields__[bits % 5]


class Stopper:
    """Says when a rank stops.

    Attributes:
        has_struck: it has.
    """

    def __init__(self, rank: int, after: int) -> None:
        self.has_struck = False
        self._rank = rank
        self._after = after

    def strikes(self, rank: int, rounds: int) -> bool:
        """Whether this rank stops now."""
        is_now = rank == self._rank and rounds > self._after
        self.has_struck |= is_now
        return is_now


class PageSwapper:
    """Has a rank give two pages in another order.

    Attributes:
        has_struck: the two have changed places.
    """

    def __init__(self, rank: int, after: int) -> None:
        self.has_struck = False
        self._rank = rank
        self._after = after

    def look(self, rank: int, rounds: int, free: list[int]) -> None:
        """Swap the two pages that a rank would give next, once it has them."""
        if not self.has_struck and rank == self._rank and rounds > self._after and len(free) > 1:
            free[-2:] = free[:-3:-1]
            self.has_struck = True


class Deviant(Policy):
    """Decides as another policy does, but leaves a prompt out in one round.

    Attributes:
        has_struck: it has happened.
    """

    def __init__(self, policy: Policy, after: int) -> None:
        super().__init__(policy.options)
        self.has_struck = False
        self._policy = policy
        self._after = after

    def plan(self, view: QueueView) -> Plan:
        """The other's plan, once without its last prompt."""
        plan = self._policy.plan(view)
        others = len(plan.prefill) - 1 + (view.num_decoding if plan.decode else 0)
        if self.has_struck or view.round < self._after or not plan.prefill or not others:
            return plan
        self.has_struck = True
        return Plan(plan.prefill[:-1], plan.decode)

    def retraction_order(self, request: RunningRequest) -> tuple[int, ...]:
        """The other's."""
        return self._policy.retraction_order(request)


class Retractor(Policy):
    """Plans as another policy does, but from some round on takes pages from whom the other would spare longest.

    Attributes:
        has_struck: it has been asked since.
    """

    def __init__(self, policy: Policy, after: int) -> None:
        super().__init__(policy.options)
        self.has_struck = False
        self._policy = policy
        self._after = after
        self._is_due = False

    def plan(self, view: QueueView) -> Plan:
        """The other's."""
        self._is_due = view.round >= self._after
        return self._policy.plan(view)

    def retraction_order(self, request: RunningRequest) -> tuple[int, ...]:
        """The other's, or what is opposite to it."""
        order = self._policy.retraction_order(request)
        self.has_struck |= self._is_due
        return tuple(-each for each in order) if self._is_due else order
