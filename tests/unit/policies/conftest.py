"""Queue states for the tests of policies."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tpserve.api import Limits, RunningRequest, WaitingRequest
from tpserve.testing.queues import QueueState

LIMITS = Limits(tokens=100, chunk=100, running=8, free_pages=50, promised_pages=0)


@pytest.fixture
def limits() -> Limits:
    return LIMITS


@pytest.fixture
def waits() -> Callable[..., WaitingRequest]:
    def make(uid: int, tokens: int = 10, **fields: int) -> WaitingRequest:
        given = {"arrival": uid, "since": 0, "priority": 0, "cached": 0, "pages": -(-tokens // 4), "promised": 0}
        return WaitingRequest(uid=uid, tokens=tokens, **{**given, **fields})

    return make


@pytest.fixture
def runs() -> Callable[..., RunningRequest]:
    def make(uid: int, pending: int = 0, priority: int = 0, since: int = 0) -> RunningRequest:
        return RunningRequest(uid, uid, priority, length=10, pending=pending, since=since)

    return make


@pytest.fixture
def state() -> Callable[..., QueueState]:
    def make(waiting=(), running=(), limits=LIMITS, now=100, finishing=0) -> QueueState:
        return QueueState(now, limits, list(waiting), list(running), finishing)

    return make
