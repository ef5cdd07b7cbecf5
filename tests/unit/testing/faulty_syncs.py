"""Syncs that each break one promise, made from the gloo one; and the contract applied to the one in FAULT."""

import os

import pytest

from tpserve.api import SyncSpec
from tpserve.sync.gloo import GlooSync
from tpserve.testing.sync import SyncContract


class Sound(GlooSync):
    """Breaks nothing."""


class Losing(GlooSync):
    def announce(self, announcement, deadline):
        if announcement.round != 100:
            super().announce(announcement, deadline)


class Repeating(GlooSync):
    def announce(self, announcement, deadline):
        for _ in range(2 if announcement.round == 100 else 1):
            super().announce(announcement, deadline)


class Waiting(GlooSync):
    """Its leader waits until the followers have heard it."""

    def announce(self, announcement, deadline):
        super().announce(announcement, deadline)
        while self._posted:
            self._finish(self._posted.popleft(), deadline)


class Open(GlooSync):
    """Its barrier holds nobody."""

    def barrier(self, deadline): ...


class Abrupt(GlooSync):
    """Forgets what is under way when it closes."""

    def close(self):
        self._posted.clear()
        super().close()


class TestFaulty(SyncContract):
    @pytest.fixture
    def spec(self):
        return SyncSpec(name="faulty", summary="breaks a promise", factory=f"{__name__}:{os.environ['FAULT']}")
