"""A report as one HTML file that needs nothing else: style, plots and the little script are all inside.

The markup is well-formed XML too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from tpserve.bench.charts import key, style_of
from tpserve.bench.host import About

__all__ = ["cell", "details", "document", "figure", "legend", "repeat", "table"]

LIGHT = ("#5c6470", "#0067b1", "#c24e00", "#00805c", "#a8447f", "#946200", "#5b51c9", "#a32f2f")
DARK = ("#a3adba", "#62b4f7", "#ff9151", "#3ecf9f", "#ee99c9", "#e6b64a", "#aaa2ff", "#ff8c85")
"""Colours of series, with the same order of hues; none is told from its neighbour by red and green alone."""
DASHES = ("7 4", "", "", "", "8 3 2 3", "", "2 3", "10 3")

STYLE = """
:root { color-scheme: light dark; --paper: #fcfcfb; --card: #fff; --ink: #1b1f24; --quiet: #5c6470; --rule: #dfe3e8;
  --good: #00754f; --bad: #b3261e; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --card: #1c2024; --ink: #e8ebee; --quiet: #a3adba;
  --rule: #343a41; --good: #4fd6a5; --bad: #ff8c85; DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 28px 20px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 25px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 40px 0 10px; }
h3 { font-size: 14px; margin: 0 0 8px; }
p { margin: 4px 0; } .quiet { color: var(--quiet); } .good { color: var(--good); } .bad { color: var(--bad); }
nav { display: flex; flex-wrap: wrap; gap: 6px 8px; margin: 14px 0 0; }
nav a { color: inherit; border: 1px solid var(--rule); border-radius: 99px; padding: 2px 12px; text-decoration: none; }
nav a:hover { border-color: var(--quiet); }
.legend { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: 4px 6px; margin: 14px 0;
  padding: 8px 0; background: var(--paper); border-bottom: 1px solid var(--rule); }
.legend button { display: flex; align-items: center; gap: 8px; font: inherit; color: inherit; background: none;
  border: 1px solid transparent; border-radius: 6px; padding: 2px 8px; cursor: pointer; }
.legend button:hover, .legend button[aria-pressed=true] { border-color: var(--quiet); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
figure { margin: 0; padding: 14px 14px 8px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 10px; }
figcaption { font-weight: 600; font-size: 14px; } figcaption small { font-weight: 400; color: var(--quiet); }
.chart { display: block; width: 100%; height: auto; } .key { width: 30px; height: 12px; }
.grid { stroke: var(--rule); stroke-width: 1; } .one { stroke: var(--ink); stroke-width: 1.5; }
.tick { font-size: 11.5px; fill: var(--quiet); font-variant-numeric: tabular-nums; }
.title { font-size: 12px; fill: var(--quiet); } .name { font-size: 12.5px; fill: var(--ink); }
.name.good { fill: var(--good); } .name.bad { fill: var(--bad); } .name.quiet { fill: var(--quiet); }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.interval { stroke: var(--c); stroke-width: 3; stroke-linecap: round; } .marker { fill: var(--c); stroke: var(--card); }
.table { overflow-x: auto; margin-top: 14px; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
th { color: var(--quiet); font-weight: 500; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; }
td:first-child .key { margin-right: 8px; vertical-align: middle; }
details { margin-top: 10px; } summary { cursor: pointer; }
pre { overflow-x: auto; padding: 10px 14px; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  font-size: 13px; white-space: pre-wrap; }
.dim .line:not(.on), .dim .marker:not(.on), .dim .interval:not(.on), .dim .series:not(.on) { opacity: .13; }
.dim .legend *, .dim table * { opacity: 1 !important; }
@media print { .legend { position: static; } }
"""

SCRIPT = """
for (const button of document.querySelectorAll('.legend button')) {
  button.addEventListener('click', () => {
    const chosen = button.getAttribute('aria-pressed') !== 'true';
    for (const other of document.querySelectorAll('.legend button')) other.setAttribute('aria-pressed', 'false');
    button.setAttribute('aria-pressed', String(chosen));
    document.body.classList.toggle('dim', chosen);
    for (const part of document.querySelectorAll('.on')) part.classList.remove('on');
    for (const part of document.querySelectorAll('.' + button.dataset.style)) {
      part.classList.add('on');
      for (const inner of part.querySelectorAll('*')) inner.classList.add('on');
    }
  });
}
"""


def document(title: str, body: Iterable[str]) -> str:
    """The whole file."""
    style = STYLE.replace("LIGHT", _variables(LIGHT)).replace("DARK", _variables(DARK)) + _series()
    inside = "\n".join(body)
    return f"""<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
{inside}
<script>//<![CDATA[
{SCRIPT}//]]></script>
</body>
</html>
"""


def figure(caption: str, note: str, chart: str) -> str:
    """A plot on a card; ``note`` says how to read it."""
    return f"<figure><figcaption>{escape(caption)} <small>{escape(note)}</small></figcaption>\n{chart}</figure>"


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are markup already."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heading)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def details(summary: str, text: str) -> str:
    """A text that opens on demand."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def legend(names: Iterable[str]) -> str:
    """Buttons that single series out, in the order of their places."""
    buttons = "".join(
        f'<button type="button" aria-pressed="false" data-style="s{style_of(place)}">{key(style_of(place))}'
        f"{escape(name)}</button>"
        for place, name in enumerate(names)
    )
    return f'<div class="legend">{buttons}</div>'


def repeat(argv: Sequence[str], about: About, plan: str, order: Iterable[Sequence[str]]) -> Iterator[str]:
    """How to run it again.

    Args:
        argv: the command line.
        about: where and with what it ran.
        plan: everything that was set.
        order: for each block the arms in the order in which they ran.
    """
    yield "<h2>How to repeat it</h2>"
    yield f"<pre>{escape(shlex.join(['tpserve', *argv[1:]]))}</pre>"
    yield table(
        ["what", "which"], [[escape(name), escape(version)] for name, version in sorted(about.versions.items())]
    )
    yield details("The machine", f"{about.system}\n{about.cpu}, {about.cores} cores, {about.memory_gib} GiB")
    yield details("Everything that was set", plan)
    turns = "\n".join(f"block {number}: {', '.join(arms)}" for number, arms in enumerate(order))
    yield details("The order in which arms ran", turns)


def cell(value: float | None) -> str:
    """A figure with three digits or more."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _variables(colours: Sequence[str]) -> str:
    return " ".join(f"--c{index}: {colour};" for index, colour in enumerate(colours))


def _series() -> str:
    rules = []
    for index, dash in enumerate(DASHES):
        rules.append(f".s{index} {{ --c: var(--c{index}); }}")
        if dash:
            rules.append(f".line.s{index} {{ stroke-dasharray: {dash}; }}")
    return "\n".join(rules)
