"""Plots as inline SVG: lines over logarithmic axes, and ratios with their intervals.

Colours and dashes come from the page's style sheet by the number of a series, ``s0`` to ``s7``; each series has its own
marker as well, so that nothing depends on telling colours apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

import msgspec

__all__ = [
    "STYLES",
    "Axis",
    "Interval",
    "Series",
    "intervals",
    "key",
    "line_chart",
    "log_axis",
    "number",
    "style_of",
    "tail_axis",
]

STYLES = 8
WIDTH, HEIGHT = 560, 320
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 14, 46
ROW = 26
LONGEST_NAME = 17
FURTHEST = 20.0
"""An interval is drawn up to this factor from its value, on both sides."""
MARKERS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-4,-4h8v8h-8z",
    "M0,-5l5,9h-10z",
    "M0,-5.5l5.5,5.5l-5.5,5.5l-5.5,-5.5z",
    "M0,5l5,-9h-10z",
    "M-5,-1.6h3.4v-3.4h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4z",
    "M-5,-2.5h10v5h-10z",
    "M-2.5,-5h5v10h-5z",
)


class Axis(msgspec.Struct, frozen=True):
    """One axis.

    Attributes:
        title: what it shows, with the unit.
        place: a value's place, from 0 to 1.
        ticks: values with their labels.
    """

    title: str
    place: Callable[[float], float]
    ticks: list[tuple[float, str]]


class Series(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        name: what it is.
        style: its number, 0 to 7.
        points: x and y.
        has_markers: show the points, each with its values.
    """

    name: str
    style: int
    points: Sequence[tuple[float, float]]
    has_markers: bool = False


def log_axis(
    values: Iterable[float],
    title: str,
    label: Callable[[float], str] | None = None,
    ticks: Iterable[float] | None = None,
    most: int = 8,
) -> Axis:
    """A logarithmic axis that holds all values, which are above 0.

    Args:
        values: what it must hold.
        title: what it shows.
        label: how a tick is written; as :func:`number` unless given.
        ticks: where they are; at round numbers unless given.
        most: so many round numbers at most.
    """
    found = [value for value in values if value > 0] or [1.0]
    low, high = math.log10(min(found)), math.log10(max(found))
    margin = max(0.02 * (high - low), 0.04)
    low, high = low - margin, high + margin
    places = sorted(set(ticks)) if ticks is not None else _round_numbers(low, high, most)
    label = label or number
    return Axis(
        title, lambda value: (math.log10(value) - low) / (high - low), [(value, label(value)) for value in places]
    )


def tail_axis(samples: int, title: str) -> Axis:
    """Shares from 0 to all but one of the samples, each factor of ten of what is left as long as the one before."""
    nines = max(1.0, math.log10(max(10, samples)))
    shares = [0.0, 0.5, *(1 - 10.0**-power for power in range(1, int(nines + 1e-9) + 1))]
    return Axis(
        title,
        lambda share: min(1.0, -math.log10(max(1 - share, 10.0**-nines)) / nines),
        [(share, f"{100 * share:.6g} %") for share in shares],
    )


def line_chart(x: Axis, y: Axis, series: Sequence[Series], label: str) -> str:
    """Lines over two axes."""
    parts = [*_grid(x, y)]
    for line in series:
        path = "L".join(f"{_x(x, a):.1f},{_y(y, b):.1f}" for a, b in line.points)
        parts.append(f'<path class="line s{line.style}" d="M{path}"><title>{escape(line.name)}</title></path>')
        if line.has_markers:
            parts += [_marker(x, y, line, point) for point in line.points]
    return _svg(WIDTH, HEIGHT, parts, label)


class Interval(msgspec.Struct, frozen=True):
    """One ratio.

    Attributes:
        name: of what.
        style: its number, 0 to 7.
        value: the ratio.
        low: where its interval begins.
        high: where it ends.
        text: what is said of it.
        tone: ``good``, ``bad`` or ``quiet``.
    """

    name: str
    style: int
    value: float
    low: float
    high: float
    text: str
    tone: str


def intervals(rows: Sequence[Interval], title: str) -> str:
    """Ratios with their intervals, one a row, beside a line at 1; ``title`` says what they are."""
    height = TOP + ROW * len(rows) + BOTTOM
    left, right = 120, WIDTH - 198
    ends = [(max(row.low, row.value / FURTHEST), min(row.high, row.value * FURTHEST)) for row in rows]
    values = [1.0, *(value for low_and_high in ends for value in low_and_high)]
    axis = log_axis(values, title, lambda value: f"{value:g}×", most=5)

    def at(value: float) -> float:
        return left + axis.place(value) * (right - left)

    bottom = height - BOTTOM
    parts = [
        f'<line class="grid" x1="{at(v):.1f}" y1="{TOP}" x2="{at(v):.1f}" y2="{bottom}"/>'
        f'<text class="tick" x="{at(v):.1f}" y="{bottom + 16}" text-anchor="middle">{escape(text)}</text>'
        for v, text in axis.ticks
    ]
    parts.append(f'<line class="one" x1="{at(1):.1f}" y1="{TOP}" x2="{at(1):.1f}" y2="{bottom}"/>')
    for index, (row, (low, high)) in enumerate(zip(rows, ends, strict=True)):
        y = TOP + ROW * (index + 0.5)
        parts.append(
            f'<g class="series s{row.style}"><text class="name" x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">'
            f"{escape(_short(row.name))}</text><title>{escape(row.name)}</title>"
            f'<line class="interval" x1="{at(low):.1f}" y1="{y:.1f}" x2="{at(high):.1f}" y2="{y:.1f}"/>'
            f'<path class="marker" transform="translate({at(row.value):.1f},{y:.1f})" d="{MARKERS[row.style]}"/>'
            f'<text class="name {row.tone}" x="{right + 14}" y="{y + 4:.1f}">{escape(row.text)}</text></g>'
        )
    middle = (left + right) / 2
    parts.append(f'<text class="title" x="{middle}" y="{height - 8}" text-anchor="middle">{escape(title)}</text>')
    return _svg(WIDTH, height, parts, title)


def key(style: int) -> str:
    """A short piece of a series' line with its marker, for a legend."""
    return (
        f'<svg class="key s{style}" viewBox="0 0 30 12" aria-hidden="true"><path class="line s{style}" d="M1,6L29,6"/>'
        f'<path class="marker" transform="translate(15,6)" d="{MARKERS[style]}"/></svg>'
    )


def style_of(place: int) -> int:
    """The number of a series by its place: the first, a baseline, is grey; others take the colours in turn."""
    return place if place < STYLES else 1 + (place - 1) % (STYLES - 1)


def number(value: float) -> str:
    """A number as short as it can be on an axis: ``20``, ``5k``, ``2M``."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:g}{unit}"
    return f"{value:.3g}"


def _round_numbers(low: float, high: float, most: int) -> list[float]:
    """As many as there may be between two powers of ten; at least two."""
    densities: tuple[tuple[Sequence[int], int], ...] = ((range(1, 10), 1), ((1, 2, 5), 1), ((1,), 1), ((1,), 2))
    found: list[float] = []
    for steps, every in densities:
        powers = (power for power in range(math.floor(low), math.ceil(high) + 1) if power % every == 0)
        found = [step * 10.0**power for power in powers for step in steps]
        found = [value for value in found if low <= math.log10(value) <= high]
        if len(found) <= most:
            break
    if len(found) < 2:  # a range so narrow that no round numbers lie in it
        found = [float(f"{10 ** (low + share * (high - low)):.3g}") for share in (0.1, 0.5, 0.9)]
    return found


def _grid(x: Axis, y: Axis) -> Iterable[str]:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    for value, label in x.ticks:
        at = _x(x, value)
        yield f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>'
        yield f'<text class="tick" x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{escape(label)}</text>'
    for value, label in y.ticks:
        at = _y(y, value)
        yield f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>'
    yield f'<text class="title" x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x.title)}</text>'
    middle = (TOP + bottom) / 2
    yield (
        f'<text class="title" x="14" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle})">{escape(y.title)}</text>'
    )


def _marker(x: Axis, y: Axis, line: Series, point: tuple[float, float]) -> str:
    place = f"translate({_x(x, point[0]):.1f},{_y(y, point[1]):.1f})"
    hint = escape(f"{line.name}: {point[1]:.4g} at {number(point[0])}")
    return (
        f'<path class="marker s{line.style}" transform="{place}" d="{MARKERS[line.style]}"><title>{hint}</title></path>'
    )


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.place(value) * (HEIGHT - TOP - BOTTOM)


def _svg(width: int, height: int, parts: Iterable[str], label: str) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">\n{inside}\n</svg>'
    )
