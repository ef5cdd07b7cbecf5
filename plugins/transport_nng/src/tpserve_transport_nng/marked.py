"""A sender's end of a pair: the peer returns marks of the sender's window of bytes.

A mark that comes back settles all that were asked for before it, as some are dropped: the receiver of a pipe cannot
send when two wait. A mark may be asked for several times, and then each answer is a write. Those to what is behind the
last frame do no harm, and are not waited for: who has taken the last frame may read no more.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from tpserve.api import TransportError
from tpserve.api.flow import NO_MARK, Window, read_mark
from tpserve_transport_nng.sockets import PairSocket

__all__ = ["MarkedPair"]


class MarkedPair(PairSocket):
    """A PairSocket that knows which marks its peer has still to write.

    Args:
        socket: a pynng.Pair0 or Pair1.
        address: where the connection is made.
        peer: what errors call the other end.
        window: counts all that is sent.
        receiver: what the window calls the other end.
        question: a message that asks for a mark, and has no frame.
        largest: bytes of a message; who sends a larger one is cut off. Any, if 0.
    """

    def __init__(
        self,
        socket: Any,
        address: str,
        peer: str,
        window: Window,
        receiver: Hashable,
        question: Callable[[int], bytes],
        largest: int = 0,
    ) -> None:
        super().__init__(socket, address, peer, largest)
        self._window = window
        self._receiver = receiver
        self._question = question
        self._asked: deque[int] = deque()
        self._is_torn = False

    @property
    def owed(self) -> bool:
        """Whether a mark may still be written that has frames behind it."""
        return bool(self._asked) and self._asked[0] < self._window.mark()

    def send_packet(self, mark: int, messages: Sequence[bytes], deadline: float, look: Callable[[], None]) -> None:
        """Send the messages that ask for a mark, or for NO_MARK; raises what :meth:`send` does.

        A packet of which a part was sent can be followed by nothing.
        """
        for sent, message in enumerate(messages, 1):
            self.send(message, deadline, look)
            self._is_torn = sent < len(messages)
        if mark != NO_MARK:
            self._asked.append(mark)

    def ask(self) -> None:
        """Ask for the mark of all that was sent, if that can be sent now; and see that the peer is still there."""
        mark = self._window.mark()
        if not self._is_torn and self.try_send(self._question(mark), 0):
            self._asked.append(mark)

    def take_mark(self, deadline: float) -> bool:
        """Take a mark; False if none comes until the deadline, or for a slice of the time until then.

        Raises:
            FrameError: what came is no mark.
            Closed: :meth:`close` was called.
        """
        message = self.receive(deadline)
        if message is None:
            return False
        mark = read_mark(message)
        self._window.returned(self._receiver, mark)
        while self._asked and self._asked[0] <= mark:
            if self._asked.popleft() == mark:
                break
        return True

    def settle(self, deadline: float) -> None:
        """Take the marks that are owed, until the deadline; nobody sends meanwhile."""
        with suppress(TransportError):  # from one that has gone, or talks nonsense, nothing is to be had
            while self.owed and not self.lost and time.monotonic() < deadline:
                if not self.take_mark(0):
                    self.ask()
                    self.take_mark(deadline)
