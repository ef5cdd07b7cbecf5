"""How the members of a gloo group tell each other where they listen: each writes files, and nobody locks any.

torch's own store for one host, FileStore, takes a lock on its file that has no deadline: a process that is stopped
while it has it stops all others, who wait for it holding Python's lock, so that not even their other threads go on.
Here a member only waits for files to appear, and whatever happens to the others, it looks at the clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from tpserve.errors import DeadlineExceeded, PeerLost

__all__ = ["FileExchange"]

ATTEMPTS = 0.01

GRACE = 0.3
"""Seconds in which others who have waited in vain will say so, if they began to wait as soon."""


class FileExchange(Store):
    """One member's view of what all have said: keys and values in a directory, a file for each.

    A key ends with the rank of the member whose it is, after a slash: gloo's keys do.

    Args:
        directory: the same for all members.
        rank: this member.
        deadline: when waiting for the others ends, whatever it is that asks.
        look: called again and again meanwhile; what it raises ends the waiting too.
    """

    def __init__(self, directory: Path, rank: int, deadline: float, look: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._directory = directory
        self._rank = rank
        self._deadline = deadline
        self._look = look
        self._said: list[Path] = []
        self._heard: set[str] = set()
        directory.mkdir(mode=0o700, exist_ok=True)

    def set(self, key: str, value: bytes | str) -> None:
        """Say something; who sees the file sees all of it."""
        place = self._place(key)
        unfinished = place.with_name(f"{place.name}.part")
        self._said += [place, unfinished]
        try:
            unfinished.write_bytes(value.encode() if isinstance(value, str) else value)
            os.replace(unfinished, place)  # noqa: PTH105 as rename, whatever is there
        except FileNotFoundError as error:
            raise PeerLost(f"rank {self._rank} comes to {self._directory}, and rank 0 has given up") from error

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all of this has been said, by the deadline.

        Raises:
            DeadlineExceeded: it has not been; this tells by whom.
        """
        while missing := self._missing(keys):
            self._look()
            if time.monotonic() >= self._deadline:
                ranks = ", ".join(key.rpartition("/")[2] for key in missing)
                raise DeadlineExceeded(f"rank {self._rank} waited in vain for rank {ranks} at {self._directory}")
            time.sleep(ATTEMPTS)

    def get(self, key: str) -> bytes:
        """What was said."""
        self.wait([key])
        try:
            return self._place(key).read_bytes()
        except FileNotFoundError as error:
            raise PeerLost(f"rank {self._rank} asks at {self._directory}, and rank 0 has given up") from error

    def silent(self, tried: Sequence[str], met: Sequence[str]) -> str:
        """Who keeps this member from connecting, as far as can be known.

        Those who can will say soon that they have tried too, or have met the others.
        """
        with suppress(PeerLost):
            self.set(tried[self._rank], b"")
        end = time.monotonic() + GRACE
        while (quiet := self._quiet(tried, met)) and time.monotonic() < end:
            time.sleep(ATTEMPTS)
        ranks = ", ".join(map(str, quiet))
        if not quiet:
            return "the others, who tried too"
        return f"rank {ranks}" if len(quiet) == 1 else f"some of rank {ranks}"

    def conclude(self, met: Sequence[str]) -> bool:
        """Say the last word, and remove everything if the others have. Rank 0 waits until somebody does.

        Returns:
            Whether that went well; False if the deadline has passed.
        """
        self.set(met[self._rank], b"")
        while self._missing(met):
            if self._rank or not self._place(met[self._rank]).exists():
                return True
            self._look()
            if time.monotonic() >= self._deadline:
                return False
            time.sleep(ATTEMPTS)
        self.withdraw(of_all=True)
        return True

    def withdraw(self, of_all: bool) -> None:
        """Remove what this member has said, or all; and the directory when nothing is left in it."""
        with suppress(FileNotFoundError):
            for path in list(self._directory.iterdir()) if of_all else self._said:
                path.unlink(missing_ok=True)
        with suppress(OSError):  # others are still there
            self._directory.rmdir()

    def _missing(self, keys: Sequence[str]) -> list[str]:
        """Those of these keys of which nothing was said so far; who has given up takes back what it has said."""
        self._heard.update(key for key in keys if key not in self._heard and self._place(key).exists())
        return [key for key in keys if key not in self._heard]

    def _quiet(self, tried: Sequence[str], met: Sequence[str]) -> list[int]:
        """Members of which nothing of this was said so far."""
        return [
            member
            for member, words in enumerate(zip(tried, met, strict=True))
            if member != self._rank and len(self._missing(words)) == len(words)
        ]

    def _place(self, key: str) -> Path:
        return self._directory / key.replace("/", ".")
