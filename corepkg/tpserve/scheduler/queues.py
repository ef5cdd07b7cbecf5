"""The requests that live on a rank, by where they stand: waiting, running, decoding."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from heapq import merge

import msgspec

from tpserve.api.policy import Level
from tpserve.kv.pool import Holding
from tpserve.messages import Generate, SamplingParams
from tpserve.step import EngineLimits
from tpserve.tokens import unpack_ids

__all__ = ["NO_SLOT", "Queues", "Request", "Tombstones"]

NO_SLOT = -1


class Request(msgspec.Struct, eq=False):
    """One request, from its message to its end.

    Attributes:
        uid: its identity.
        arrival: its place among the requests that were accepted.
        since: the round in which it began to wait.
        priority: larger is more urgent.
        params: how it is sampled.
        tokens: prompt and output so far.
        prompt_tokens: how many of ``tokens`` the client sent.
        limit: it ends when it has so many tokens.
        stops: tokens that end it earlier.
        known: how many of ``tokens`` there were when it was admitted; once all are computed, it decodes.
        length: how many positions have been computed, or are being computed.
        room: how many its pages have room for.
        slot: its row in the engine's tables.
        holding: its pages.
        peeked: what was last found out about its cached prefix while it waited: at which version of the cache, and what
            Capacity.peek then returned; at version -1 if that never was.
        has_started: whether the client was told that it started.
        has_ended: whether it lives no more; a step under way may still compute a token of it.
    """

    uid: int
    arrival: int
    since: int
    priority: int
    params: SamplingParams
    tokens: array[int]
    prompt_tokens: int
    limit: int
    stops: tuple[int, ...]
    known: int = 0
    length: int = 0
    room: int = 0
    slot: int = NO_SLOT
    holding: Holding | None = None
    peeked: tuple[int, int, int] = (-1, 0, 0)
    has_started: bool = False
    has_ended: bool = False

    @classmethod
    def of(cls, message: Generate, arrival: int, round: int, limits: EngineLimits) -> Request:
        """Make a request of its message."""
        params = message.params
        assert params.max_tokens is not None, f"request {message.uid} came without max_tokens"
        tokens = unpack_ids(message.prompt_ids)
        prompt_tokens = len(tokens)
        tokens.frombytes(message.output_ids)
        return cls(
            uid=message.uid,
            arrival=arrival,
            since=round,
            priority=message.priority,
            params=params,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            limit=min(prompt_tokens + params.max_tokens, limits.max_context),
            stops=() if params.ignore_eos else limits.eos_ids,
        )

    @property
    def pending(self) -> int:
        """Tokens known at its admission that are still to be computed; 0 when it decodes."""
        return max(0, self.known - self.length)

    @property
    def reserve(self) -> int:
        """The most tokens that it can ever have cached: the last one drawn is never computed."""
        return self.limit - 1


class Queues:
    """Every living request, by where it stands.

    Attributes:
        running: holds pages; by admission.
        decoding: those of ``running`` that take one token a step; by the step in which they began to.
        levels: those that wait by priority, largest first.
    """

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        self._living: dict[int, Request] = {}
        self._waiting = _Line()
        self.levels: list[Level] = []
        self._lines: dict[int, _Line] = {}

    def __len__(self) -> int:
        return self.num_waiting + len(self.running)

    def __iter__(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self._waiting

    @property
    def num_waiting(self) -> int:
        """How many requests hold no pages."""
        return len(self._waiting)

    @property
    def has_ending(self) -> bool:
        """Whether a running request only awaits its last token, and then gives back what it holds."""
        return any(not each.pending and each.uid not in self.decoding for each in self.running.values())

    def get(self, uid: int) -> Request | None:
        """The living request of this uid, if there is one."""
        return self._living.get(uid)

    def get_waiting(self, uid: int) -> Request | None:
        """The waiting request of this uid, if there is one."""
        return None if uid in self.running else self._living.get(uid)

    def waiting(self, priority: int | None = None) -> Iterator[Request]:
        """Those that wait, all or of one priority, by arrival."""
        return iter(self._waiting if priority is None else self._lines.get(priority, ()))

    def enqueue(self, request: Request) -> None:
        """Let a new request wait, behind all others."""
        self._living[request.uid] = request
        self._waiting.join(request)
        line = self._line_of(request)
        line.join(request)
        if len(line) == 1:
            self._renew_level(request.priority)

    def admit(self, request: Request) -> None:
        """Move a request from waiting to running."""
        self._wait_no_more(request)
        self.running[request.uid] = request

    def retract(self, request: Request) -> None:
        """Move a request from running to waiting, in its place by arrival."""
        del self.running[request.uid]
        self.decoding.pop(request.uid, None)
        self._waiting.rejoin(request)
        self._line_of(request).rejoin(request)
        self._renew_level(request.priority)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it stands."""
        del self._living[request.uid]
        if self.running.pop(request.uid, None) is None:
            self._wait_no_more(request)
        self.decoding.pop(request.uid, None)

    def _line_of(self, request: Request) -> _Line:
        return self._lines.setdefault(request.priority, _Line())

    def _wait_no_more(self, request: Request) -> None:
        self._waiting.leave(request)
        self._lines[request.priority].leave(request)
        self._renew_level(request.priority)

    def _renew_level(self, priority: int) -> None:
        """Say who is the first of this priority now."""
        index = bisect_left(self.levels, -priority, key=_urgency)
        is_there = index < len(self.levels) and self.levels[index].priority == priority
        first = next(iter(self._lines[priority]), None)
        renewed = [Level(priority, first.since, first.arrival)] if first else []
        self.levels[index : index + is_there] = renewed
        if not first:
            del self._lines[priority]


class _Line:
    """Requests by arrival. What is done with a few of them costs the same in a long line as in a short one."""

    def __init__(self) -> None:
        # An OrderedDict, because taking from the front of a long one is cheap. Those that had to give their pages up
        # come in no order, and are kept apart.
        self._joined: OrderedDict[int, Request] = OrderedDict()
        self._rejoined: list[Request] = []

    def __len__(self) -> int:
        return len(self._joined) + len(self._rejoined)

    def __iter__(self) -> Iterator[Request]:
        if not self._rejoined:
            return iter(self._joined.values())
        return merge(self._rejoined, self._joined.values(), key=_arrival)

    def join(self, request: Request) -> None:
        """Add one that came after all others."""
        self._joined[request.uid] = request

    def rejoin(self, request: Request) -> None:
        """Add one that was there before."""
        insort(self._rejoined, request, key=_arrival)

    def leave(self, request: Request) -> None:
        """Take one out."""
        if self._joined.pop(request.uid, None) is None:
            found = self._rejoined.pop(bisect_left(self._rejoined, request.arrival, key=_arrival))
            assert found is request, f"request {request.uid} is not where its arrival says"


class Tombstones:
    """Uids whose abort came before they did. Remembers the last CAPACITY of them.

    An abort follows its request's way, so one that finds no request has nearly always come just after the request
    finished, and its tombstone is never asked for: they have to be bounded.
    """

    CAPACITY = 4096

    def __init__(self) -> None:
        self._uids: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._uids)

    def add(self, uid: int) -> None:
        """Remember a uid, and forget the oldest if there are too many."""
        self._uids[uid] = None
        if len(self._uids) > self.CAPACITY:
            self._uids.popitem(last=False)

    def take(self, uid: int) -> bool:
        """Whether this uid is remembered; it is not any more."""
        return self._uids.pop(uid, uid) is None


def _arrival(request: Request) -> int:
    return request.arrival


def _urgency(level: Level) -> int:
    return -level.priority
