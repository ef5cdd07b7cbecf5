"""Stop strings: where a text ends that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Passes a text on until one of several strings occurs in it.

    The result does not depend on how the text was cut into pieces: the match that is complete first ends the text, and
    of several that are complete at the same character the longest does. Text that may still turn out to be the
    beginning of a match is held back. Each character costs a bounded number of steps (Knuth, Morris and Pratt).

    Args:
        stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece.

        Returns:
            What may be passed on, and whether a stop string was found; after that nothing may be pushed.
        """
        buffer = self._held + text
        offset = len(self._held)
        for end, char in enumerate(text, offset + 1):
            length = self._step(char)
            if length:
                self._held = ""
                return buffer[: end - length], True
        keep = len(buffer) - max(self._matched, default=0)
        self._held = buffer[keep:]
        return buffer[:keep], False

    def flush(self) -> str:
        """What was held back, when the text ends without a match."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Advance all patterns by one character; the length of the longest that is complete, or 0."""
        complete = 0
        for index, (stop, borders) in enumerate(self._patterns):
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                complete = max(complete, matched)
        return complete


def _borders(stop: str) -> list[int]:
    """For each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders
