"""The parts of a page: one HTML file that needs nothing else, in light and dark, on any screen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

from perfed.core.layout import Table, with_minus
from perfed.report import theme
from perfed.report.charts import Chart
from perfed.report.svg import inline_svg

GROUND = ("#f6f6f4", "#141518")


def document(title: str, body: str, reload_seconds: int = 0) -> str:
    reloading = f'<meta http-equiv="refresh" content="{reload_seconds}">' if reload_seconds else ""
    script = (resources.files("perfed.report") / "page.js").read_text("utf-8")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{reloading}
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_styles()}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
<div id="tip" role="tooltip"></div>
<script>{script}</script>
</body>
</html>
"""


def _styles() -> str:
    variables = {"--ground": GROUND, **theme.VARIABLES}
    light, dark = (
        "".join(f"{name}:{pair[ground]};" for name, pair in variables.items()) for ground in (0, 1)
    )
    sheet = (resources.files("perfed.report") / "page.css").read_text("utf-8")
    return (
        f":root{{{light}}}\n@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n"
        f"{sheet}"
    )


def table_card(
    name: str, table: Table, marks: Sequence[str] = (), sources: Mapping[str, str] | None = None
) -> str:
    """A table with its note; ``marks`` are HTML before the first cell of each row, ``sources`` the
    same table in other languages, to open and copy."""
    body = []
    for number, cells in enumerate(table.rows):
        texts = [
            escape(cell if place < table.names else with_minus(cell))
            for place, cell in enumerate(cells)
        ]
        texts = [
            f"<b>{text}</b>" if (number, place) in table.bold else text
            for place, text in enumerate(texts)
        ]
        if marks:
            texts[0] = marks[number] + texts[0]
        body.append(_cells("td", texts, table.names))
    head = _cells("th", map(escape, table.header), table.names)
    lines = "\n".join(body)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    rest = "".join(details(title, text) for title, text in (sources or {}).items())
    return (
        f'<section class="card"><h2>{escape(table.title)}</h2><div class="scroll" tabindex="0">'
        f'<table id="{name}"><thead>{head}</thead>\n<tbody>{lines}</tbody></table></div>'
        f"{note}{rest}</section>"
    )


def _cells(tag: str, texts: Iterable[str], names: int) -> str:
    """A line of a table; the first ``names`` columns are words, the others numbers."""
    line = (
        f'<{tag} class="word">{text}</{tag}>' if place < names else f"<{tag}>{text}</{tag}>"
        for place, text in enumerate(texts)
    )
    return f"<tr>{''.join(line)}</tr>"


def line_mark(number: int, second: bool = False) -> str:
    """The colour and style of a curve."""
    dashed = "" if theme.style(number, second) == theme.STYLES[0] else " dashed"
    return f'<i class="swatch{dashed}" style="--own:{_variable(number)}"></i>'


def point_mark(number: int) -> str:
    """The colour and shape of a point."""
    shape = theme.SHAPES[theme.marker(number)]
    return (
        f'<svg class="swatch" viewBox="0 0 10 10" aria-hidden="true">'
        f'<path d="{shape}" style="fill:{_variable(number)}"/></svg>'
    )


def _variable(number: int) -> str:
    return f"var(--colour-{number % len(theme.COLOURS)})"


def figures_html(charts: Iterable[Chart]) -> list[str]:
    import matplotlib as mpl

    with mpl.rc_context(theme.RC):
        return [
            f'<figure id="{chart.name}"><h2>{escape(chart.title)}</h2>\n{inline_svg(chart)}\n'
            f"<figcaption>{escape(_unbroken(chart.caption))}</figcaption></figure>"
            for chart in charts
        ]


def _unbroken(text: str) -> str:
    """A number and its unit stay on one line."""
    return re.sub(r"(?<=\d) (?=[%kMG])", "\N{NO-BREAK SPACE}", text)


def details(title: str, text: str) -> str:
    """Text that a reader may open."""
    return (
        f"<details><summary>{escape(title)}</summary>"
        f"<pre><code>{escape(text)}</code></pre></details>"
    )
