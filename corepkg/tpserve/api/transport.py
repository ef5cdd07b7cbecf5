"""The ``transport`` kind: how bytes reach the ranks.

Two shapes of link exist. A *fan-out* carries the leader's frames to every follower. A *pipe* carries
frames from many senders to one receiver (tokenizers to the leader, the leader to the detokenizer).

**The guarantee**, for both: what a send accepted arrives at every receiver once, whole and in order, or
both sides get a :class:`~tpserve.api.errors.TransportError`; nothing is ever dropped in silence. A link is
ready before its first send: :meth:`FanoutSender.connect` returns only when every follower will receive what
is sent next. Memory is bounded, in bytes: a sender that runs ahead of its receiver blocks, until its deadline. A peer
that dies is noticed within 5 seconds by a call that waits, for it or for others of the link, and by the next send; by
``connect``, while others are still to come, perhaps only at its deadline. (A server watches its processes itself, and
ends a start in which one dies.) Waiting costs no CPU time. A *stranger*, who connects to where a link listens and says
nothing, or nonsense, takes nobody's place, delays nobody beyond a deadline and makes nobody fail.

Closing a sending end, and then its transport, delivers what was accepted: it waits for receivers that are slow
to take it, for a bounded time, and ends when they have taken it. ``connect`` is called once, before anything else.
After PeerLost or FrameError, and after any error of ``connect``, an end can only be closed.

A *deadline* is a value of :func:`time.monotonic` in seconds; ``math.inf`` waits for ever. A call ends soon after its
deadline, within 2 seconds. A *frame* is ``bytes`` of any length, zero included; transports never look inside.

An *address* is ``ipc:///path`` or ``tcp://host:port``. With ``ipc`` the path is absolute, no directory, and lies in a
private directory that the launcher makes and removes; an implementation may put further files beside it, with the path
as prefix, and removes them on close. With ``tcp`` it may use the ports that follow, one for each follower. An address
that is malformed is an error; so is one where a leader waits, or a receiver is, to another. What a killed process left
is not; and what is there and is not the implementation's own is never removed or written to.
An end may be made in one thread and used in another, by one at a time; only :meth:`close` may be called meanwhile: a
call that waits then ends with :class:`~tpserve.api.errors.Closed`, and so does one that comes later.

:mod:`tpserve.api.flow` and :mod:`tpserve.api.addresses` have help for implementations, :mod:`tpserve.testing.transport`
tests them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from tpserve.api.errors import UnsupportedByPlugin
from tpserve.api.specs import Options

__all__ = ["FanoutReceiver", "FanoutSender", "PipeReceiver", "PipeSender", "Transport"]


class Link(ABC):
    """What all ends of links share: :meth:`close`, and use as a context manager."""

    @abstractmethod
    def close(self) -> None:
        """Release every descriptor, file and thread of this end, connected or not.

        May be called twice: the second time it touches nothing, for the address may be somebody else's by then.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class FanoutSender(Link):
    """The leader's end of a fan-out."""

    @abstractmethod
    def connect(self, deadline: float) -> None:
        """Wait until every follower has joined and will receive the next frame sent.

        Raises:
            DeadlineExceeded: not all followers came; the message says how many did.
            PeerLost: one that came has gone. Not every implementation can see that before the deadline.
        """

    @abstractmethod
    def send_many(self, frames: Sequence[bytes], deadline: float) -> None:
        """Send frames to every follower, in order. An empty sequence sends nothing.

        Returns when the frames are accepted, which may be before they are read. Frames of one call travel together:
        thirty small ones should cost little more than one.

        Raises:
            DeadlineExceeded: a follower did not make room in time. Some of the frames may have been sent, to some
                followers: the fan-out can only be closed.
            PeerLost: a follower has gone.
            Closed: after :meth:`close`.
        """


class FanoutReceiver(Link):
    """A follower's end of a fan-out."""

    @abstractmethod
    def connect(self, deadline: float) -> None:
        """Join the fan-out and wait until the leader knows it.

        Raises:
            DeadlineExceeded: the leader did not answer.
            PeerLost: it has gone. Not every implementation can see that before the deadline.
        """

    @abstractmethod
    def recv_many(self, count: int, deadline: float) -> list[bytes]:
        """Take exactly ``count`` frames, in the order sent, however they were batched; ``count`` 0 takes none.

        Raises:
            DeadlineExceeded: fewer came in time; none of them is lost to a later call.
            PeerLost: the leader has gone, and fewer frames than that are left.
            FrameError: the link noticed a gap.
            Closed: after :meth:`close`.
        """


class PipeSender(Link):
    """One of the sending ends of a pipe."""

    @abstractmethod
    def connect(self, deadline: float) -> None:
        """Wait until the receiver will get what is sent next, whether or not it is reading yet.

        Raises:
            DeadlineExceeded: the receiver did not come.
        """

    @abstractmethod
    def send(self, frame: bytes, deadline: float) -> None:
        """Send one frame; blocks while the receiver is behind.

        Raises:
            DeadlineExceeded: the receiver did not make room in time; the frame was not sent.
            PeerLost: the receiver has gone.
            Closed: after :meth:`close`.
        """


class PipeReceiver(Link):
    """The receiving end of a pipe; exists once and is there from construction on (it binds)."""

    @abstractmethod
    def recv_many(self, max_frames: int, max_bytes: int, deadline: float) -> list[bytes]:
        """Wait for a first frame, then take what has already arrived, without waiting again.

        Frames of one sender keep their order; frames of several interleave as they came.

        Args:
            max_frames: take no more than this many.
            max_bytes: stop once at least this many bytes are taken (so one frame always passes).
            deadline: when to stop waiting for the first; 0 does not wait.

        Returns:
            The frames; empty if none came in time.

        Raises:
            Closed: after :meth:`close`, also to a call that is waiting.
        """


class Transport(ABC):
    """Makes the ends of links. One per process; a process makes its ends after it has started.

    Args:
        options: an instance of the spec's ``options`` struct.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def fanout_sender(self, address: str, followers: int) -> FanoutSender:
        """Make the leader's end for ``followers`` ≥ 1 followers.

        Raises:
            TransportError: the address is malformed, or another leader waits there; the message names it.
            UnsupportedByPlugin: this transport has pipes only.
        """

    @abstractmethod
    def fanout_receiver(self, address: str, follower: int, followers: int) -> FanoutReceiver:
        """Make the end of follower ``follower``, 0 ≤ follower < followers.

        Raises:
            TransportError: the address is malformed, or there is no such follower; if not here, then from ``connect``.
            UnsupportedByPlugin: this transport has pipes only.
        """

    def pipe_receiver(self, address: str) -> PipeReceiver:
        """Make the receiving end of a pipe and bind it.

        Raises:
            TransportError: the address is malformed, or taken; the message names it.
            UnsupportedByPlugin: this transport has a fan-out only.
        """
        raise UnsupportedByPlugin(f"{type(self).__name__} has no pipes")

    def pipe_sender(self, address: str) -> PipeSender:
        """Make a sending end of a pipe.

        Raises:
            TransportError: the address is malformed; if not here, then from ``connect``.
            UnsupportedByPlugin: this transport has a fan-out only.
        """
        raise UnsupportedByPlugin(f"{type(self).__name__} has no pipes")

    @abstractmethod
    def close(self) -> None:
        """Close every end made here and the library's context. May be called twice.

        Who asks for another end afterwards gets :class:`~tpserve.api.errors.Closed`.
        """
