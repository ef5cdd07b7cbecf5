"""An engine without a model: its tokens are a pure function of each row's content, and it refuses wrong steps.

It keeps a token pool, a page table and a paged cache as a real engine does. A cached position holds a 64-bit digest
of all tokens up to it; every step reads the digests before its first position back through the page table and asserts
that they are what the row's tokens say. So a page that is lent twice, a position that is left out, computed twice or
put in the wrong place is found by the step that would have read nonsense.

A page is filled from its beginning: whoever writes into it makes what stood behind worthless. And nobody writes behind
what it has not read. So the last digest that is read of a page stands for all of the page, and a row reads its pages
again only when some page was overwritten since.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from tpserve.messages import SamplingParams
from tpserve.step import EngineLimits, PageWrite, Pending, Sequence, SlotParams, Step, TokenWrite

__all__ = ["SMALL_LIMITS", "FakeEngine", "continuation"]

SMALL_LIMITS = EngineLimits(pages=64, page_size=4, slots=8, max_context=64, vocab_size=50, eos_ids=(1, 2))
"""A pool that a few requests fill, and a vocabulary in which texts end by themselves now and then."""

UNREAD = -1
MASK = (1 << 64) - 1


class FakePending:
    """A step that was computed when it was launched."""

    def __init__(self, drawn: list[int]) -> None:
        self._drawn = drawn

    def tokens(self) -> list[int]:
        """The tokens drawn, in batch order."""
        return self._drawn


class FakeEngine:
    """A :class:`tpserve.step.Engine` for tests.

    Args:
        limits: what it says it has.
        step_tokens: the most positions that a step may compute; 0: any number.
        chunk: the most of one row; 0: any number.
    """

    def __init__(self, limits: EngineLimits = SMALL_LIMITS, step_tokens: int = 0, chunk: int = 0) -> None:
        self._limits = limits
        self._step_tokens = step_tokens
        self._chunk = chunk
        self._rows: list[Row | None] = [None] * limits.slots
        self._cache: list[list[int]] = [[] for _ in range(limits.pages)]
        self._overwritten = 0
        self._closed = False

    @property
    def limits(self) -> EngineLimits:
        """What this engine has."""
        return self._limits

    def launch(self, step: Step) -> Pending:
        """Check and compute a step.

        Raises:
            AssertionError: the step is wrong; the message names row and position.
        """
        assert not self._closed, "a step for a closed engine"
        assert step.sequences, "a step that computes nothing"
        slots = [sequence.slot for sequence in step.sequences]
        assert len(set(slots)) == len(slots), f"a row occurs twice: {slots}"
        self._check_size([sequence.end - sequence.start for sequence in step.sequences])
        for tokens in step.tokens:
            self._write_tokens(tokens)
        for pages in step.pages:
            self._write_pages(pages)
        for params in step.params:
            self._row(params.slot).params = params
        drawn = [self._compute(sequence) for sequence in step.sequences]
        return FakePending([token for token in drawn if token is not None])

    def close(self) -> None:
        """Refuse further steps."""
        self._closed = True

    def _check_size(self, lengths: list[int]) -> None:
        total, longest = sum(lengths), max(lengths)
        assert not self._step_tokens or total <= self._step_tokens, f"a step of {total} tokens, not {self._step_tokens}"
        assert not self._chunk or longest <= self._chunk, f"{longest} tokens of one row, not {self._chunk}"

    def _row(self, slot: int) -> Row:
        assert 0 <= slot < self._limits.slots, f"row {slot} of {self._limits.slots}"
        row = self._rows[slot]
        assert row, f"row {slot} was never written"
        return row

    def _write_tokens(self, write: TokenWrite) -> None:
        if write.start == 0 and 0 <= write.slot < self._limits.slots:
            self._rows[write.slot] = Row()
        row = self._row(write.slot)
        assert (row.computed or 0) <= write.start <= len(row.tokens), (
            f"row {write.slot}: tokens written at {write.start}; {row.computed} are computed, {len(row.tokens)} known"
        )
        assert all(0 <= token < self._limits.vocab_size for token in write.tokens), f"row {write.slot}: not a token"
        row.tokens[write.start :] = write.tokens
        assert len(row.tokens) <= self._limits.max_context, f"row {write.slot}: {len(row.tokens)} tokens"

    def _write_pages(self, write: PageWrite) -> None:
        row = self._row(write.slot)
        assert write.start <= len(row.pages), f"row {write.slot}: a gap before page {write.start}"
        row.pages[write.start : write.start + len(write.pages)] = write.pages
        row.read_at = UNREAD
        assert len(set(row.pages)) == len(row.pages), f"row {write.slot}: a page twice in {row.pages}"
        for page in write.pages:
            assert 0 <= page < self._limits.pages, f"row {write.slot}: page {page} of {self._limits.pages}"

    def _compute(self, sequence: Sequence) -> int | None:
        row = self._row(sequence.slot)
        start, end = sequence.start, sequence.end
        place = f"row {sequence.slot}, positions {start} to {end}"
        assert 0 <= start < end, f"{place}: nothing to compute"
        assert row.computed is None or row.computed <= start, f"{place}: {row.computed} are computed"
        assert end <= len(row.tokens), f"{place}: only {len(row.tokens)} tokens are known"
        assert end <= len(row.pages) * self._limits.page_size, f"{place}: only {len(row.pages)} pages"
        assert sequence.sample == (end == len(row.tokens)), f"{place}: sample is {sequence.sample}"
        row.digest(end)
        if row.read_at != self._overwritten or row.computed != start:
            self._read(row, start, place)
        self._store(row, start, end)
        row.read_at = self._overwritten
        row.computed = end
        if not sequence.sample:
            return None
        assert row.params, f"{place}: sampled without parameters"
        assert end < self._limits.max_context, f"{place}: no room for the token drawn"
        token = _draw(row.digests[-1], end, row.params, self._limits.vocab_size)
        row.tokens.append(token)
        return token

    def _read(self, row: Row, end: int, place: str) -> None:
        """Assert that the pages before position ``end`` hold what the row's tokens say."""
        size, cache, digests = self._limits.page_size, self._cache, row.digests
        for page, last in zip(row.pages, range(size - 1, end + size - 1, size), strict=False):
            position = min(last, end - 1)
            held = cache[page]
            assert len(held) > position % size, f"{place}: page {page} does not hold what was computed"
            assert held[position % size] == digests[position], f"{place}: page {page} does not hold what was computed"

    def _store(self, row: Row, start: int, end: int) -> None:
        size = self._limits.page_size
        while start < end:
            page, offset = self._cache[row.pages[start // size]], start % size
            stop = min(end, start - offset + size)
            self._overwritten += len(page) > offset
            page[offset:] = row.digests[start:stop]
            start = stop


class Row:
    """One row of the token pool and the page table.

    Attributes:
        tokens: all that are known.
        digests: of the first tokens; entry p covers positions 0 … p.
        pages: its page table.
        params: how it is sampled.
        computed: how many positions it has computed; None before its first step, which may begin behind cached ones.
        read_at: how many pages had been overwritten when its pages were last known to be right.
    """

    __slots__ = ("computed", "digests", "pages", "params", "read_at", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.digests: list[int] = []
        self.pages: list[int] = []
        self.params: SlotParams | None = None
        self.computed: int | None = None
        self.read_at = UNREAD

    def digest(self, end: int) -> None:
        """Bring the digests up to position ``end - 1``."""
        _extend(self.digests, self.tokens[len(self.digests) : end])


def continuation(
    tokens: Tokens[int], params: SamplingParams, count: int, limits: EngineLimits = SMALL_LIMITS
) -> list[int]:
    """The ``count`` tokens that a fake engine draws after ``tokens``, end-of-text tokens or not."""
    digests: list[int] = []
    drawn: list[int] = []
    slot = SlotParams(0, params.temperature, params.top_k, params.top_p, params.min_p, params.seed or 0)
    _extend(digests, tokens)
    for _ in range(count):
        drawn.append(_draw(digests[-1], len(digests), slot, limits.vocab_size))
        _extend(digests, drawn[-1:])
    return drawn


def _extend(digests: list[int], tokens: Tokens[int]) -> None:
    digest = digests[-1] if digests else 0
    for token in tokens:
        digest = _mix(digest, token)
        digests.append(digest)


def _draw(digest: int, position: int, params: SlotParams, vocab_size: int) -> int:
    if params.temperature:
        digest = _mix(_mix(_mix(digest, params.seed), position), _filters(params))
    return (digest >> 20) % vocab_size


def _filters(params: SlotParams) -> int:
    """A number that another ``top_k``, ``top_p`` or ``min_p`` would change."""
    return params.top_k * 1_000_003 + int(params.top_p * 997) * 1_009 + int(params.min_p * 997)


def _mix(digest: int, value: int) -> int:
    digest = (digest ^ value) + 0x9E3779B97F4A7C15 & MASK
    digest = (digest ^ digest >> 30) * 0xBF58476D1CE4E5B9 & MASK
    return digest ^ digest >> 27
