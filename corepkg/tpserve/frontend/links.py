"""The api process's links of one generation, each with a thread of its own: the event loop never waits for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import msgspec

from tpserve.api import PipeReceiver, PipeSender
from tpserve.envelope import Opener, Sealer
from tpserve.errors import Closed, TransportError
from tpserve.frontend.control import Links
from tpserve.messages import ApiMessage, decode_api

__all__ = ["Connection"]

API = 0
"""The api process's number in envelopes."""

MAX_FRAMES = 256
MAX_BYTES = 8 << 20

LEAVE = 1.0
"""Seconds that a thread has for noticing that its link was closed."""

Deliver = Callable[[list[ApiMessage]], None]
OnLoss = Callable[[str], None]


class Connection:
    """All links of one generation at work.

    Args:
        links: the ends; closed by this object.
        deadline: until when the tokenizers must have been reached.
        deliver: called from a thread with all messages that came at once.
        on_loss: called from a thread, with the reason, for each link that fails.
    """

    def __init__(self, links: Links, deadline: float, deliver: Deliver, on_loss: OnLoss) -> None:
        self._outlets = [_Outlet(sender, deadline, on_loss) for sender in links.tokenizers]
        self._inlet = _Inlet(links.receiver, deliver, on_loss)

    @property
    def tokenizers(self) -> int:
        """How many tokenizers there are."""
        return len(self._outlets)

    @property
    def backlog(self) -> int:
        """Messages that wait to be sent."""
        return sum(outlet.backlog for outlet in self._outlets)

    def send(self, uid: int, payload: bytes) -> None:
        """Queue an encoded message of request ``uid``; all of a request's go one way. Never blocks."""
        self._outlets[uid % len(self._outlets)].send(payload)

    def send_all(self, payload: bytes) -> None:
        """Queue an encoded message to every tokenizer."""
        for outlet in self._outlets:
            outlet.send(payload)

    def close(self, timeout: float) -> None:
        """Send what is queued, for at most ``timeout`` seconds a link, then let the links go."""
        for outlet in self._outlets:
            outlet.close(timeout)
        self._inlet.close()


class _Outlet:
    """Sends to one tokenizer."""

    def __init__(self, sender: PipeSender, deadline: float, on_loss: OnLoss) -> None:
        self._sender = sender
        self._deadline = deadline
        self._on_loss = on_loss
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="to-tokenizer", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        return self._queue.qsize()

    def send(self, payload: bytes) -> None:
        self._queue.put(payload)

    def close(self, timeout: float) -> None:
        self._queue.put(None)
        self._thread.join(timeout)
        self._sender.close()
        self._thread.join(LEAVE)

    def _run(self) -> None:
        sealer = Sealer(API)
        try:
            self._sender.connect(self._deadline)
            while (payload := self._queue.get()) is not None:
                self._sender.send(sealer.seal(payload), math.inf)
        except Closed:
            pass
        except TransportError as error:
            self._on_loss(f"the link to a tokenizer failed: {error}")


class _Inlet:
    """Receives from tokenizers and detokenizers, all the time, whatever the event loop does."""

    def __init__(self, receiver: PipeReceiver, deliver: Deliver, on_loss: OnLoss) -> None:
        self._receiver = receiver
        self._deliver = deliver
        self._on_loss = on_loss
        self._thread = Thread(target=self._run, name="from-detokenizer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._receiver.close()
        self._thread.join(LEAVE)

    def _run(self) -> None:
        opener = Opener()
        try:
            while True:
                frames = self._receiver.recv_many(MAX_FRAMES, MAX_BYTES, math.inf)
                self._deliver([decode_api(opener.open(frame)) for frame in frames])
        except Closed:
            pass
        except (TransportError, msgspec.DecodeError) as error:
            self._on_loss(f"the link from the detokenizers failed: {error}")
