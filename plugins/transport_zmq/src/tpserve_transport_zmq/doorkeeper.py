"""Who may connect: zmq asks a socket of ours about everybody who comes, before it takes a message of his.

A socket that binds and requires PLAIN, zmq's mechanism of a name and a password, drops who does not speak it: any
other program's zmq socket. So nothing of a stranger is ever queued, and what does come is from ends of our own. The
password is no secret; it is the protocol that both ends speak.
"""

from __future__ import annotations

from threading import Thread

import zmq

__all__ = ["Context", "Doorkeeper", "introduce", "require"]

Context = zmq.Context[zmq.Socket[bytes]]

PLACE = "inproc://zeromq.zap.01"  # where zmq asks
MECHANISM = b"PLAIN"
NAME = b"tpserve"
YES, NO = b"200", b"400"


class Doorkeeper:
    """Answers, in a thread of its own, until the context ends.

    Args:
        context: whose sockets it answers for.
    """

    def __init__(self, context: Context) -> None:
        self._questions = context.socket(zmq.REP)
        self._questions.setsockopt(zmq.LINGER, 0)
        self._questions.bind(PLACE)
        self._thread = Thread(target=self._answer, name="zmq-doorkeeper", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end, once the context has ended."""
        self._thread.join()

    def _answer(self) -> None:
        with self._questions:
            try:
                while True:
                    version, number, protocol, _address, _identity, *greeting = self._questions.recv_multipart()
                    answer = YES if greeting == [MECHANISM, NAME, protocol] else NO
                    self._questions.send_multipart([version, number, answer, b"", b"", b""])
            except zmq.ContextTerminated:
                return


def require(socket: zmq.Socket[bytes], protocol: bytes) -> None:
    """Have a socket that is to bind take those alone who speak this protocol; its context needs a Doorkeeper."""
    socket.setsockopt(zmq.PLAIN_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, protocol)


def introduce(socket: zmq.Socket[bytes], protocol: bytes) -> None:
    """Have a socket that is to connect say that it speaks this protocol."""
    socket.setsockopt(zmq.PLAIN_USERNAME, NAME)
    socket.setsockopt(zmq.PLAIN_PASSWORD, protocol)
