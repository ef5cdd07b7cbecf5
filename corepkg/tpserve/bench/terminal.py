"""Tables for a terminal and for files, in which no figure is ever cut off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

__all__ = ["Grid", "report_console"]

UNBOUNDED = 10_000
"""Columns, more than any table needs."""


def report_console() -> Console:
    """Where a report is printed: as wide as the terminal, or as its tables need if there is none."""
    console = Console()
    if not console.is_terminal:
        console.width = UNBOUNDED
    return console


class Grid:
    """A table; where it does not fit, its rows one below the other with a line for each cell.

    Args:
        heading: of each column; the first column names the rows.
        rows: their cells; empty ones are left out where they have lines.
        figures: so many columns after the first are aligned right.
    """

    def __init__(self, heading: Sequence[str], rows: Sequence[Sequence[str | Text]], *, figures: int = 0) -> None:
        self._heading = heading
        self._rows = [[cell if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
        self._figures = figures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        table = self._table()
        needed = Measurement.get(console, options.update_width(UNBOUNDED), table).maximum
        if needed <= options.max_width:
            yield table
        else:
            yield from self._lines()

    def _table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for place, title in enumerate(self._heading):
            justify: JustifyMethod = "right" if 0 < place <= self._figures else "left"
            table.add_column(Text(title), justify=justify, no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table

    def _lines(self) -> Iterator[Text]:
        width = max(len(title) for title in self._heading[1:])
        yield Text(self._heading[0], style="bold")
        for name, *cells in self._rows:
            yield Text.assemble("  ", name)
            for title, cell in zip(self._heading[1:], cells, strict=False):
                if cell:
                    yield Text.assemble(f"    {title:<{width}}  ", cell)
        yield Text()
