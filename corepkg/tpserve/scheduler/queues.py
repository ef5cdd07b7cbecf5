"""The requests that live on a rank: who waits, who holds pages, and what a policy may see of them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from tpserve.api.policy import Limits, RunningRequest, WaitingRequest
from tpserve.messages import Generate, SamplingParams
from tpserve.step import EngineLimits
from tpserve.tokens import unpack_ids

__all__ = ["Queues", "Request", "Tombstones", "View"]

NO_SLOT = -1


class Request(msgspec.Struct, eq=False):
    """One request, from its message to its finish.

    Attributes:
        uid: its identity.
        arrival: its place among the requests that were accepted.
        params: how it is sampled.
        tokens: prompt and output so far.
        prompt_tokens: how many of ``tokens`` the client sent.
        known: how many of ``tokens`` were there when it was queued; once all are computed, it decodes.
        limit: it finishes when it has so many tokens.
        stops: tokens that finish it earlier.
        length: how many positions have been computed, or are being computed.
        slot: its row in the engine's tables.
        pages: the pages it holds.
    """

    uid: int
    arrival: int
    params: SamplingParams
    tokens: array[int]
    prompt_tokens: int
    known: int
    limit: int
    stops: tuple[int, ...]
    length: int = 0
    slot: int = NO_SLOT
    pages: list[int] = []

    @classmethod
    def of(cls, message: Generate, arrival: int, limits: EngineLimits) -> Request:
        """Make a request of its message."""
        params = message.params
        assert params.max_tokens is not None, f"request {message.uid} came without max_tokens"
        tokens = unpack_ids(message.prompt_ids)
        prompt_tokens = len(tokens)
        tokens.frombytes(message.output_ids)
        return cls(
            uid=message.uid,
            arrival=arrival,
            params=params,
            tokens=tokens,
            prompt_tokens=prompt_tokens,
            known=len(tokens),
            limit=min(prompt_tokens + params.max_tokens, limits.max_context),
            stops=() if params.ignore_eos else limits.eos_ids,
        )

    @property
    def pending(self) -> int:
        """Known tokens that are still to be computed; 0 when it decodes."""
        return max(0, self.known - self.length)

    @property
    def reserve(self) -> int:
        """The most tokens that it can ever have cached: the last one drawn is never computed."""
        return self.limit - 1


class Queues:
    """Every living request, by where it stands.

    Attributes:
        waiting: holds no pages; by arrival. An OrderedDict, because taking from the front of a long one is cheap.
        running: holds pages; by admission.
        decoding: those of ``running`` that take one token a step; by the step in which they began to.
    """

    def __init__(self) -> None:
        self.waiting: OrderedDict[int, Request] = OrderedDict()
        self.running: dict[int, Request] = {}
        self.decoding: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running)

    def __iter__(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self.waiting.values()

    def get(self, uid: int) -> Request | None:
        """The living request of this uid, if there is one."""
        return self.running.get(uid) or self.waiting.get(uid)

    def enqueue(self, request: Request) -> None:
        """Let a new request wait, behind all others."""
        self.waiting[request.uid] = request

    def admit(self, request: Request) -> None:
        """Move a request from waiting to running."""
        self.running[request.uid] = self.waiting.pop(request.uid)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it stands."""
        if self.running.pop(request.uid, None) is None:
            del self.waiting[request.uid]
        self.decoding.pop(request.uid, None)


class View:
    """The queues as a policy sees them; a :class:`tpserve.api.policy.QueueView`."""

    def __init__(self, queues: Queues, limits: Limits) -> None:
        self._queues = queues
        self._limits = limits

    @property
    def limits(self) -> Limits:
        """What the plan must keep to."""
        return self._limits

    @property
    def num_waiting(self) -> int:
        """How many requests wait."""
        return len(self._queues.waiting)

    @property
    def num_running(self) -> int:
        """How many requests hold pages."""
        return len(self._queues.running)

    @property
    def num_decoding(self) -> int:
        """How many of the running requests decode."""
        return len(self._queues.decoding)

    def waiting(self) -> Iterator[WaitingRequest]:
        """Requests without pages, by arrival; lazy."""
        for request in self._queues.waiting.values():
            yield WaitingRequest(request.uid, request.arrival, request.pending, request.reserve, priority=0)

    def running(self) -> Iterator[RunningRequest]:
        """Requests with pages, by arrival; lazy."""
        for request in sorted(self._queues.running.values(), key=_arrival):
            yield RunningRequest(
                request.uid, request.arrival, request.length, request.pending, request.reserve, priority=0
            )


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
