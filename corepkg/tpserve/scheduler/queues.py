"""The requests that live on a rank, by where they stand: waiting, running, decoding."""

from __future__ import annotations

from array import array
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import merge

import msgspec

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
        peeked: what was last found out about its cached prefix while it waits; see Capacity.peek.
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
    """

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}
        # OrderedDicts, because taking from the front of a long one is cheap. Those that had to give their pages up
        # are few, came before most others, and are kept apart.
        self._waiting: OrderedDict[int, Request] = OrderedDict()
        self._retracted: list[Request] = []
        self._levels: dict[int, OrderedDict[int, Request]] = {}

    def __len__(self) -> int:
        return self.num_waiting + len(self.running)

    def __iter__(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self._retracted
        yield from self._waiting.values()

    @property
    def num_waiting(self) -> int:
        """How many requests hold no pages."""
        return len(self._waiting) + len(self._retracted)

    @property
    def has_ending(self) -> bool:
        """Whether a running request only awaits its last token, and then gives back what it holds."""
        return any(not each.pending and each.uid not in self.decoding for each in self.running.values())

    @property
    def priorities(self) -> Sequence[int]:
        """The priorities of those that wait, largest first."""
        found = {request.priority for request in self._retracted}
        return sorted(found.union(self._levels), reverse=True)

    def get(self, uid: int) -> Request | None:
        """The living request of this uid, if there is one."""
        return self.running.get(uid) or self.get_waiting(uid)

    def get_waiting(self, uid: int) -> Request | None:
        """The waiting request of this uid, if there is one."""
        return self._waiting.get(uid) or next((each for each in self._retracted if each.uid == uid), None)

    def waiting(self, priority: int | None = None) -> Iterator[Request]:
        """Those that wait, all or of one priority, by arrival."""
        level = self._waiting if priority is None else self._levels.get(priority, OrderedDict())
        if not self._retracted:
            return iter(level.values())
        retracted = [each for each in self._retracted if priority in {None, each.priority}]
        return merge(retracted, level.values(), key=_arrival)

    def enqueue(self, request: Request) -> None:
        """Let a new request wait, behind all others."""
        self._waiting[request.uid] = request
        self._levels.setdefault(request.priority, OrderedDict())[request.uid] = request

    def admit(self, request: Request) -> None:
        """Move a request from waiting to running."""
        self._remove_waiting(request)
        self.running[request.uid] = request

    def retract(self, request: Request) -> None:
        """Move a request from running to waiting."""
        del self.running[request.uid]
        self.decoding.pop(request.uid, None)
        insort(self._retracted, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it stands."""
        if self.running.pop(request.uid, None) is None:
            self._remove_waiting(request)
        self.decoding.pop(request.uid, None)

    def _remove_waiting(self, request: Request) -> None:
        if self._waiting.pop(request.uid, None) is None:
            self._retracted.remove(request)
            return
        level = self._levels[request.priority]
        del level[request.uid]
        if not level:
            del self._levels[request.priority]


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
