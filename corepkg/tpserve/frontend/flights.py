"""The memory of the requests in flight: what was asked and what has come, which is all it takes to send them again."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec.structs import replace

from tpserve.frontend.answer import Answer
from tpserve.frontend.metrics import Outcome
from tpserve.messages import Started, Tokenize

__all__ = ["MAX_RESENDS", "Flights"]

MAX_RESENDS = 2
"""How often a request is sent again after a death. One that causes them has to go before the supervisor gives up."""


class Flight(msgspec.Struct, eq=False):
    """One request.

    Attributes:
        request: as it was first sent.
        answer: what has come.
        resends: how often it may still be sent again.
    """

    request: Tokenize
    answer: Answer
    resends: int


class Flights:
    """All requests in flight, in the order of their admission."""

    def __init__(self) -> None:
        self._flights: dict[int, Flight] = {}
        self._none = asyncio.Event()
        self._none.set()

    def __len__(self) -> int:
        return len(self._flights)

    async def none(self) -> None:
        """Wait until there are none."""
        await self._none.wait()

    def add(self, request: Tokenize, answer: Answer, resends: int) -> None:
        """Remember a request that is sent for the first time."""
        self._flights[request.uid] = Flight(request, answer, resends)
        self._none.clear()

    def start(self, started: Started) -> None:
        """A request has been admitted: news only once, also if it had to be sent again."""
        answer = self.get(started.uid)
        if answer is not None and not answer.started:
            answer.start(started.prompt_tokens, started.cached_tokens)

    def get(self, uid: int) -> Answer | None:
        """The answer to a request; None if that is not in flight."""
        flight = self._flights.get(uid)
        return flight.answer if flight else None

    def take(self, uid: int, outcome: Outcome) -> Answer:
        """Forget a request, which has ended this way; its answer."""
        answer = self._flights.pop(uid).answer
        answer.meter.end(outcome)
        if not self._flights:
            self._none.set()
        return answer

    def take_all(self) -> list[Answer]:
        """Forget all requests, which have failed; their answers."""
        return [self.take(uid, "error") for uid in list(self._flights)]

    def take_spent(self) -> list[Answer]:
        """Forget those that may not be sent again, which have failed; their answers."""
        return [self.take(uid, "error") for uid, flight in list(self._flights.items()) if not flight.resends]

    def again(self) -> list[Tokenize]:
        """What sends all requests again, to processes that know nothing of them: none may be spent."""
        messages = []
        for flight in self._flights.values():
            flight.resends -= 1
            messages.append(replace(flight.request, output_ids=flight.answer.tokens))
        return messages
