"""What goes wrong with processes that depend on each other, and which of several troubles is the cause."""

from __future__ import annotations

from collections.abc import Iterable

from tpserve.launch.protocol import Failed
from tpserve.launch.watch import Exited, Happening, Said

__all__ = ["SETTLE_SECONDS", "Trouble", "find_cause", "trouble_of"]

SETTLE_SECONDS = 0.5
"""After a first sign of trouble, how long others may show that theirs came before: peers fail within milliseconds."""


class Trouble(Exception):
    """A process has ended or failed, or keeps everyone waiting.

    Args:
        summary: what happened, in one line.
        failure: the last word of the process, if it had one.
        weight: how likely it is to follow from another trouble; the lightest is taken for the cause.
    """

    def __init__(self, summary: str, failure: Failed | None = None, weight: int = 1) -> None:
        super().__init__(summary)
        self.summary = summary
        self.failure = failure
        self.weight = weight

    @property
    def is_user_error(self) -> bool:
        """The user can mend it."""
        return self.failure is not None and self.failure.is_user_error

    @property
    def headline(self) -> str:
        """What happened, without what an error quotes: paths, or bytes that somebody sent."""
        return self.summary.partition(":")[0]

    @property
    def report(self) -> str:
        """All that is known: the summary, or the traceback that ends with the same words."""
        if self.failure is None or not self.failure.traceback:
            return self.summary
        return f"{self.headline}\n{self.failure.traceback.rstrip()}"


def trouble_of(happening: Happening) -> Trouble | None:
    """What is wrong with a child that said this or ended; None if nothing is.

    A death without a word is the most likely cause, by a signal above all; a lost peer the least, or an end of which
    nothing is known.
    """
    match happening:
        case Said(child, Failed() as failure):
            return Trouble(f"{child.name} failed: {failure.error}", failure, 2 if failure.is_consequence else 1)
        case Exited(child) if child.failure is not None:
            return trouble_of(Said(child, child.failure))
        case Exited(child):
            return Trouble(f"{child.name} ended with {child.describe_exit()}", None, 2 if child.is_unreported else 0)
    return None


def find_cause(troubles: Iterable[Trouble]) -> Trouble:
    """The first of the lightest."""
    return min(troubles, key=lambda trouble: trouble.weight)
