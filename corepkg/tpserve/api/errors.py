"""Every error that tpserve raises on purpose.

    TpserveError
    ├── UserError               the person who ran it can mend it: one line, a hint, exit code 2
    │   ├── ConfigError         a flag, an environment variable, a key of a file
    │   ├── ModelError          a model that is missing, unsupported or cannot be split
    │   ├── LaunchError         the machine refuses: a busy port, no memory
    │   └── PluginError
    │       ├── UnknownPlugin
    │       ├── UnavailablePlugin
    │       ├── UnsupportedByPlugin
    │       └── PluginConflict
    ├── RequestError            one request is wrong: a 4xx that names the field
    ├── TransportError          a link failed
    │   ├── DeadlineExceeded
    │   ├── PeerLost
    │   ├── FrameError          a frame that is damaged, missing or out of order
    │   └── Closed              used after close()
    ├── SyncError               a sync got something else than what was due
    └── RankError               a rank must stop: names rank, round, expected and found
        └── Divergence          two ranks decided differently

An assertion, by contrast, guards our own invariants: it is a bug report, never advice to a user.
"""

from __future__ import annotations

import re

__all__ = [
    "Closed",
    "ConfigError",
    "DeadlineExceeded",
    "Divergence",
    "FrameError",
    "LaunchError",
    "ModelError",
    "PeerLost",
    "PluginConflict",
    "PluginError",
    "RankError",
    "RequestError",
    "SyncError",
    "TpserveError",
    "TransportError",
    "UnavailablePlugin",
    "UnknownPlugin",
    "UnsupportedByPlugin",
    "UserError",
]


CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def _escaped(found: re.Match[str]) -> str:
    return repr(found[0])[1:-1]


class TpserveError(Exception):
    """Base of every error that tpserve raises on purpose."""


class UserError(TpserveError):
    """Something the person at the keyboard can mend.

    Args:
        message: what is wrong and where, in one line without a full stop.
        hint: what to do about it, in one line; may be empty.

    Names from elsewhere cannot make two lines of one, nor write to a terminal what is no text: line breaks and other
    control characters are escaped.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = CONTROL.sub(_escaped, message)
        self.hint = CONTROL.sub(_escaped, hint)

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class ConfigError(UserError):
    """A flag, an environment variable or a key of a configuration file is wrong."""


class ModelError(UserError):
    """A model cannot be found, read, or split as asked."""


class LaunchError(UserError):
    """The machine refuses what was asked of it: a busy port, too little memory."""


class PluginError(UserError):
    """A plugin cannot be used."""


class UnknownPlugin(PluginError):
    """No plugin of this kind has this name."""


class UnavailablePlugin(PluginError):
    """The plugin is installed and cannot run on this machine."""


class UnsupportedByPlugin(PluginError):
    """The plugin runs here and does not offer what was asked (a pipe, a head size, a dtype)."""


class PluginConflict(PluginError):
    """Two distributions provide the same kind and name."""


class RequestError(TpserveError):
    """One request is wrong; the service is not.

    Args:
        message: what is wrong, for the client.
        param: the request field it concerns, or None.
        code: a short machine-readable code, as OpenAI's API has them, or None.
        status: the HTTP status to answer with, 4xx.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status


class TransportError(TpserveError):
    """A link between two processes failed."""


class DeadlineExceeded(TransportError, TimeoutError):
    """What was waited for did not come in time."""


class PeerLost(TransportError):
    """The other side of a link has gone."""


class FrameError(TransportError):
    """A frame is damaged, missing or out of order."""


class Closed(TransportError):
    """The link was closed on this side."""


class SyncError(TpserveError):
    """A sync got something else than the announcement, or the sign, that was due."""


class RankError(TpserveError):
    """A rank cannot go on.

    Args:
        rank: the rank that raises.
        round: the round it was in.
        expected: what it needed to see.
        found: what it saw.
    """

    def __init__(self, rank: int, round: int, expected: object, found: object) -> None:
        super().__init__(f"rank {rank}, round {round}: expected {expected}, found {found}")
        self.rank = rank
        self.round = round
        self.expected = expected
        self.found = found


class Divergence(RankError):
    """Two ranks decided differently in the same round."""
