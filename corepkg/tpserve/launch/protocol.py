"""What a supervisor and its children say to each other: one JSON object a line.

Down the child's standard input go a :class:`ChildSpec`, then events. Up an inherited pipe come statuses.
"""

from __future__ import annotations

import msgspec

from tpserve.frontend.control import ControlEvent
from tpserve.step import EngineLimits
from tpserve.values import to_json

__all__ = [
    "Alive",
    "ChildSpec",
    "Failed",
    "Progress",
    "Ready",
    "Serving",
    "Status",
    "Stuck",
    "decode_event",
    "decode_status",
    "line",
]


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one child is to be.

    Attributes:
        name: what people find it by: ``rank0`` gets the process title ``tpserve: rank0``.
        place: who writes its log lines.
        main: ``package.module:function``; called with a :class:`~tpserve.launch.child.Line` and ``payload``.
        payload: the function's argument as JSON.
        cpus: the cores that it may run on; empty: all.
        log_level: debug, info, warning or error.
        parent: process id of the starter.
        status_fd: the descriptor that statuses are written to.
        outlives_thread: it was started by a thread that may end before it.
    """

    name: str
    place: str
    main: str
    payload: msgspec.Raw
    cpus: list[int] = []
    log_level: str = "info"
    parent: int = 0
    status_fd: int = -1
    outlives_thread: bool = False


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """How far a long piece of start-up has come, in bytes."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """All that this process loads is loaded and its links are up, save those to the api process.

    Attributes:
        limits: from a rank: what its engine has.
    """

    limits: EngineLimits | None = None


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """The api process has had its warm-up request answered by this generation: clients are served from now on."""

    generation: int


class Stuck(msgspec.Struct, frozen=True, tag="stuck"):
    """The api process cannot use this generation: the warm-up was refused, or a link broke."""

    generation: int
    reason: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The last word of a child that cannot go on.

    Attributes:
        error: the exception's name and text, in one line.
        traceback: as Python prints it; empty for errors that tpserve raises on purpose.
        hint: what the user can do about it.
        is_user_error: the user can mend it, so nobody needs the traceback.
        is_consequence: it lost a peer: the cause is likely to be found there.
    """

    error: str
    traceback: str = ""
    hint: str = ""
    is_user_error: bool = False
    is_consequence: bool = False


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The answer to a ping: the main loop waits for work, or gets on with it."""


Status = Progress | Ready | Serving | Stuck | Failed | Alive

_events = msgspec.json.Decoder(ControlEvent)
_statuses = msgspec.json.Decoder(Status)


def line(message: ChildSpec | ControlEvent | Status) -> bytes:
    """Write anything of this module as a line."""
    return to_json(message) + b"\n"


def decode_event(text: bytes) -> ControlEvent:
    """Read an event."""
    return _events.decode(text)


def decode_status(text: bytes) -> Status:
    """Read a status."""
    return _statuses.decode(text)
