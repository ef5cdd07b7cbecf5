"""The api process's links, each with a thread of its own, so that its event loop never waits for one."""

from __future__ import annotations

import math
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

import msgspec

from tpserve.api import PipeReceiver, PipeSender
from tpserve.envelope import Opener, Sealer
from tpserve.errors import Closed, TransportError
from tpserve.messages import ApiMessage, decode_api

__all__ = ["Inlet", "Outlet"]

MAX_FRAMES = 256
MAX_BYTES = 8 << 20


class Outlet:
    """Sends to one tokenizer.

    Args:
        sender: the connected pipe; used by this object's thread alone, and closed by it.
        producer: the api process's number in envelopes.
        on_loss: called once, from the thread, with the reason when the link fails.
    """

    def __init__(self, sender: PipeSender, producer: int, on_loss: Callable[[str], None]) -> None:
        self._sender = sender
        self._sealer = Sealer(producer)
        self._on_loss = on_loss
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="to-tokenizer", daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Messages that wait to be sent."""
        return self._queue.qsize()

    def send(self, payload: bytes) -> None:
        """Queue an encoded message; never blocks. What is queued after the link failed is dropped."""
        self._queue.put(payload)

    def close(self, timeout: float) -> None:
        """Send what is queued, for at most ``timeout`` seconds, then let the link go."""
        self._queue.put(None)
        self._thread.join(timeout)
        self._sender.close()

    def _run(self) -> None:
        try:
            while (payload := self._queue.get()) is not None:
                self._sender.send(self._sealer.seal(payload), math.inf)
        except Closed:
            pass
        except TransportError as error:
            self._on_loss(f"the link to a tokenizer failed: {error}")


class Inlet:
    """Receives from tokenizers and detokenizers, all the time, whatever the event loop does.

    Args:
        receiver: the bound pipe; used by this object's thread alone, and closed by it.
        deliver: called from the thread with all messages that came at once.
        on_loss: called once, from the thread, with the reason when the link fails.
    """

    def __init__(
        self, receiver: PipeReceiver, deliver: Callable[[list[ApiMessage]], None], on_loss: Callable[[str], None]
    ) -> None:
        self._receiver = receiver
        self._deliver = deliver
        self._on_loss = on_loss
        self._thread = Thread(target=self._run, name="from-detokenizer", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop receiving."""
        self._receiver.close()
        self._thread.join(timeout)

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
