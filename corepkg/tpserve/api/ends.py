"""Help for authors of transports: the ends that one has made, which are closed with it. Nothing here is required."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from tpserve.api.errors import Closed
from tpserve.api.transport import Link

__all__ = ["Ends"]

End = TypeVar("End", bound=Link)


class Ends:
    """The ends of one transport in one process."""

    def __init__(self) -> None:
        self._ends: list[Link] = []
        self._closed = False

    def add(self, make: Callable[[], End]) -> End:
        """Make an end, and close it in :meth:`close`.

        Raises:
            Closed: after :meth:`close`.
        """
        if self._closed:
            raise Closed("the transport was closed")
        end = make()
        self._ends.append(end)
        return end

    def close(self) -> None:
        """Close all ends, in the order in which they were made, whatever one of them raises. May be called twice."""
        self._closed = True
        ends, self._ends = self._ends, []
        with ExitStack() as stack:
            for end in reversed(ends):
                stack.callback(end.close)
