"""The page of a study: its tables and figures as one HTML file, and each as files of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfed.config import dump_yaml
from perfed.core import layout
from perfed.core.layout import Table
from perfed.core.method_numbers import method_numbers
from perfed.core.schema import plain
from perfed.core.tensorfile import write_atomically
from perfed.report import theme
from perfed.report.charts import Chart, listed, plain_log, whole_rounds
from perfed.report.document import details, document, figures_html, point_mark, table_card
from perfed.report.page import write_figures
from perfed.runs.study import folder_name, machines
from perfed.runs.study_tables import Outcome, Row, Section
from perfed.runs.tables import HARM, quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "study"  # of the files
OF_METHODS = ("setting ", "over all settings")
"""How the names of tables begin whose rows are methods."""


@dataclass(frozen=True)
class StudyPage:
    """What a study found, drawn once."""

    outcome: Outcome

    @cached_property
    def charts(self) -> dict[str, list[Chart]]:
        """By setting."""
        import matplotlib as mpl

        with mpl.rc_context(theme.RC):
            return {
                section.name: _charts(section, number)
                for number, section in enumerate(self.outcome.sections, start=1)
            }

    @cached_property
    def overview(self) -> list[Chart]:
        """Of all settings together."""
        import matplotlib as mpl

        with mpl.rc_context(theme.RC):
            drawn = (_gains_in_every_setting(self.outcome), _every_setting(self.outcome))
            return [chart for chart in drawn if chart is not None]

    @property
    def all_charts(self) -> list[Chart]:
        return [*self.overview, *(c for charts in self.charts.values() for c in charts)]

    @cached_property
    def tables(self) -> dict[str, Table]:
        return self.outcome.tables()

    @cached_property
    def values(self) -> dict[str, list[dict[str, Any]]]:
        return self.outcome.values()

    def write(self, folder: Path) -> list[Path]:
        """The page, all tables as Markdown and LaTeX, and each as LaTeX and CSV; curves as CSV."""
        texts = {
            f"{NAME}.html": self.html(),
            f"{NAME}.md": layout.markdown(self.tables.values()) + "\n",
            f"{NAME}.tex": layout.latex(self.tables.values()) + "\n",
        }
        for name, rows in self.values.items():
            texts[f"csv/{folder_name(name)}.csv"] = layout.csv_text(rows)
        for name, table in self.tables.items():
            texts[f"latex/{folder_name(name)}.tex"] = layout.latex([table]) + "\n"
        for name, text in texts.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / name, text.encode())
        return [folder / name for name in texts]

    def write_figures(self, folder: Path, kind: str) -> list[Path]:
        """Each figure as a PNG or PDF file."""
        return write_figures(self.all_charts, folder, kind)

    def html(self) -> str:
        design = self.outcome.design
        over_all = [
            self._card("over all settings, accuracy"),
            f'<div class="lead">{"".join(figures_html(self.overview))}</div>',
            self._card("over all settings"),
        ]
        settings = [
            f"{self._card(f'setting {name}')}\n"
            f'<div class="lead">{"".join(figures_html(charts))}</div>'
            for name, charts in self.charts.items()
        ]
        body = "\n".join(
            [
                f"<p>{escape(design.about)}</p>" if design.about else "",
                f'<p class="about">{escape(_facts(self.outcome))}</p>',
                _state(self.outcome),
                *over_all,
                *settings,
                self._card("chosen settings"),
                self._card("without a result"),
                _origin(self.outcome),
            ]
        )
        return document(f"{design.name}: a study of {len(design.methods)} methods", body)

    def _card(self, name: str) -> str:
        table = self.tables.get(name)
        if table is None:
            return ""
        numbers = method_numbers(method.name for method in self.outcome.design.methods)
        marks = [point_mark(numbers[row[0]]) for row in table.rows] if _of_methods(name) else []
        sources = {"LaTeX": layout.latex([table]), "CSV": layout.csv_text(self.values[name])}
        return table_card(folder_name(name), table, marks, sources)


def _of_methods(name: str) -> bool:
    return name.startswith(OF_METHODS)


def _facts(outcome: Outcome) -> str:
    design = outcome.design
    seeds = ", ".join(map(str, design.seeds))
    words = [
        f"{len(design.methods)} methods",
        f"{len(design.settings)} setting{'s' if len(design.settings) > 1 else ''}",
        f"seeds {seeds}" if len(design.seeds) > 1 else f"one seed ({seeds})",
    ]
    return " · ".join(words)


def _state(outcome: Outcome) -> str:
    """How much of it is there."""
    fitting = [f for f in outcome.found if not f.left_out]
    planned = len(fitting) * len(outcome.design.seeds)
    done = sum(len(f.records) + len(f.failed) for f in fitting)
    if done == planned:
        return ""
    return (
        f'<div class="state">Not finished: {done} of {planned} runs are there. '
        "The same command goes on.</div>"
    )


def _origin(outcome: Outcome) -> str:
    """Where the numbers come from: settings and machines."""
    design = outcome.design
    methods = {method.name: plain(method.algorithm) for method in design.methods}
    sections = [
        details("Methods, as listed", dump_yaml(methods)),
        *(details(f"Setting {name}", dump_yaml(keys)) for name, keys in design.settings.items()),
        *(details("Machine and versions", dump_yaml(one)) for one in machines(outcome.records())),
    ]
    return f'<section class="card" id="configuration">{"".join(sections)}</section>'


# Figures.


MOST_PANELS = 8
FEW_HARMED = 5.0  # percent of the clients


def _gains_in_every_setting(outcome: Outcome) -> Chart | None:
    """A row for each method, a panel for each setting: who gains where, at a glance."""
    shown = {section.name: rows for section in outcome.sections if (rows := taught(section))}
    if not 1 < len(shown) <= MOST_PANELS:
        return None
    found = by_gain(shown.values())
    methods = [*found]
    columns = 2 if len(shown) in (2, 4) else 3
    lines = -(-len(shown) // columns)
    height = 0.17 * len(methods) + 0.1
    figure, panels = theme.canvas(
        lines * (height + 0.5) + 0.4,
        lines,
        columns,
        left=0.15 + 0.075 * max(len(_short(method)) for method in methods),
        top=0.3,
        sharex=True,
        sharey=True,
        squeeze=False,
        gridspec_kw={"wspace": 0.08, "hspace": 0.5 / height},
    )
    chart = Chart("gains", "Gains in every setting", figure)
    for (name, rows), axes in zip(shown.items(), panels.flat, strict=False):
        axes.set_title(_short(name, 44 // columns))
        axes.axvline(0, color=theme.MUTED, lw=1)
        axes.tick_params(labelbottom=True)
        for row in rows:
            _gain_in_row(chart, axes, row, -methods.index(row.method))
    for spare in panels.flat[len(shown) :]:
        spare.set_visible(False)
    panels[0, 0].set_yticks([-place for place in range(len(methods))], map(_short, methods))
    panels[0, 0].set_ylim(0.6 - len(methods), 0.6)
    figure.supxlabel("points above local", fontsize=theme.RC["axes.labelsize"])
    chart.caption = (
        f"Methods that send something, by mean gain. {_mean_of(outcome.sections)} Bars: 95 % "
        f"intervals. Hollow: more than {FEW_HARMED:g} % of the clients end more than {HARM:g} "
        "points below their local model."
    )
    if any(len(rows) < len(shown) for rows in found.values()):
        chart.caption += " Below are those that have not run in every setting."
    return chart


def taught(section: Section) -> list[Row]:
    """Methods in which clients hear of others. Who only names its most frequent label is so far
    below local training that others could not be told apart."""
    rows = [row for row in section.rows if row.gain is not None]
    return [row for row in rows if row.found.cell.method.algorithm.sends != "nothing"]


def by_gain(settings: Iterable[Sequence[Row]]) -> dict[str, list[Row]]:
    """Each method's rows of all settings. Who has run in every setting comes first, and then who
    gains most."""
    found: dict[str, list[Row]] = {}
    for row in chain.from_iterable(settings):
        found.setdefault(row.method, []).append(row)

    def place(method: str) -> tuple[int, float]:
        rows = found[method]
        return -len(rows), -statistics.mean(row.gain or 0 for row in rows)

    return {method: found[method] for method in sorted(found, key=place)}


def _gain_in_row(chart: Chart, axes: Axes, row: Row, height: int) -> None:
    colour = theme.colour(row.number)
    if row.interval:
        axes.plot(row.interval, [height] * 2, color=colour, lw=1.2)
    hollow = (row.harmed_percent or 0) > FEW_HARMED
    axes.scatter(
        [row.gain or 0],
        [height],
        s=24,
        marker=theme.marker(row.number),
        facecolor=theme.PAPER if hollow else colour,
        edgecolor=colour,
        gid=chart.tip([_gain_tip(row)]),
        zorder=3,
        clip_on=False,
    )


def _every_setting(outcome: Outcome) -> Chart | None:
    """A panel for each setting, with one legend: the figure of a paper."""
    sections = outcome.sections
    if not 1 < len(sections) <= MOST_PANELS:
        return None
    everything = sorted((r for s in sections for r in s.rows), key=lambda row: row.number)
    if max(len(row.curve()[0]) for row in everything) < 2:
        return None
    rows = list({row.method: row for row in everything}.values())  # one of each method
    lines = -(-len(sections) // 2)
    figure, panels = theme.canvas(
        0.35 + 1.9 * lines,
        lines,
        2,
        left=0.6,
        top=0.3,
        bottom=0.55,
        legend=-(-len(rows) // _columns(rows)),
        squeeze=False,
        gridspec_kw={"wspace": 0.28, "hspace": 0.5},
    )
    chart = Chart("settings", "Accuracy by round in every setting", figure)
    for section, axes in zip(sections, panels.flat, strict=False):
        _draw_curves(axes, sorted(section.rows, key=lambda row: row.number))
        axes.set_title(_short(section.name))
        whole_rounds(axes)
    for spare in panels.flat[len(sections) :]:
        spare.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel("test accuracy (%)")
    for axes in panels.flat[max(0, len(sections) - 2) : len(sections)]:
        axes.set_xlabel("communication round")
    first = panels.flat[0]
    for row in rows:  # a legend is of one panel: what only others have is there without a line
        if sections[0].row(row.method) is None:
            look = {"color": theme.colour(row.number), "ls": theme.style(row.number)}
            first.plot([], [], **look, label=row.method)
    theme.legend(figure, first, _columns(rows))
    chart.caption = f"{_mean_of(sections)} Each panel has its own data, and its own scale."
    if len(outcome.design.seeds) > 1:
        chart.caption += " Bands: ± one standard deviation over seeds."
    return chart


def _mean_of(sections: Sequence[Section]) -> str:
    lied = any(section.hostile_words() for section in sections)
    return f"Mean over all{' honest' * lied} clients."


def _short(name: str, most: int = 26) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


def _charts(section: Section, number: int) -> list[Chart]:
    drawn = (_accuracy_against_bytes, _gain_against_harm, _accuracy_by_round)
    return [chart for draw in drawn if (chart := draw(section, number)) is not None]


def _accuracy_against_bytes(section: Section, number: int) -> Chart | None:
    talking = [row for row in section.rows if row.bytes_per_round]
    silent = [row for row in section.rows if not row.bytes_per_round]
    if not talking:
        return None
    chart, axes = _canvas(
        f"bytes-{number}", f"Accuracy against bytes: {section.name}", section.rows
    )
    for row in silent:
        axes.axhline(
            100 * row.accuracy,
            color=theme.colour(row.number),
            ls=(0, (1, 2)),
            lw=1.4,
            label=row.method,
        )
    _points(chart, axes, talking, lambda row: (row.bytes_per_round, 100 * row.accuracy), _cost_tip)
    sent = [row.bytes_per_round for row in talking]
    axes.set_xlim(min(sent) / 1.6, max(sent) * 1.6)
    plain_log(axes, "B")
    axes.set(xlabel="bytes a round, both ways (log scale)", ylabel="mean test accuracy (%)")
    theme.legend(chart.figure, axes, _columns(section.rows))
    best = [row for row in talking if not any(_beats(other, row) for other in talking)]
    best.sort(key=lambda row: row.bytes_per_round)
    words = [
        f"{row.method} ({100 * row.accuracy:.1f} %, {quantity(row.bytes_per_round, 'B')})"
        for row in best
    ]
    chart.caption = (
        "Further left is cheaper, further up is better. No method is both cheaper and better than "
        f"{listed(words)}."
    )
    if silent:
        names = listed([row.method for row in silent])
        chart.caption += f" Dotted: {names}, without any communication."
    return chart


def _beats(one: Row, other: Row) -> bool:
    """At least as good in both, and better in one."""
    ours, theirs = (one.bytes_per_round, -one.accuracy), (other.bytes_per_round, -other.accuracy)
    return all(a <= b for a, b in zip(ours, theirs, strict=True)) and ours != theirs


def _gain_against_harm(section: Section, number: int) -> Chart | None:
    rows = [row for row in section.rows if row.gain is not None]
    if not rows:
        return None
    chart, axes = _canvas(f"harm-{number}", f"Gain against harm: {section.name}", rows)
    axes.axhline(0, color=theme.MUTED, lw=1)
    for row in rows:
        low, high = row.interval or (0, 0)
        harmed = row.harmed_percent or 0
        axes.plot([harmed] * 2, [low, high], color=theme.colour(row.number), alpha=0.45)
    _points(chart, axes, rows, lambda row: (row.harmed_percent or 0, row.gain or 0), _gain_tip)
    axes.set(
        xlabel=f"clients more than {HARM:g} points below local (%)", ylabel="points above local"
    )
    axes.set_xlim(left=-2)
    theme.legend(chart.figure, axes, _columns(rows))
    unharmed = [row.method for row in rows if not row.harmed_percent and (row.gain or 0) > 0]
    most = max(rows, key=lambda row: row.gain or 0)
    chart.caption = (
        "Further up is better, further left harms fewer clients. Bars: 95 % intervals. "
        f"{'The largest mean gain is' if (most.gain or 0) > 0 else 'No mean is a gain. Highest is'}"
        f" that of {most.method}: {_signed(most.gain or 0)} points, with "
        f"{most.harmed_percent:.0f} % of the clients harmed."
    )
    if unharmed:
        chart.caption += f" Gain, and nobody harmed: {listed(unharmed)}."
    return chart


def _accuracy_by_round(section: Section, number: int) -> Chart | None:
    if max(len(row.curve()[0]) for row in section.rows) < 2:
        return None
    chart, axes = _canvas(f"rounds-{number}", f"Accuracy by round: {section.name}", section.rows)
    _draw_curves(axes, section.rows)
    axes.set(xlabel="communication round", ylabel="mean test accuracy (%)")
    whole_rounds(axes)
    theme.legend(chart.figure, axes, _columns(section.rows))
    chart.caption = _mean_of([section])
    if any(len(row.seeds) > 1 for row in section.rows):
        chart.caption += " Bands: ± one standard deviation over seeds."
    return chart


def _draw_curves(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        rounds, accuracies = row.curve()
        mean, colour = accuracies.mean(0), theme.colour(row.number)
        axes.plot(rounds, mean, color=colour, ls=theme.style(row.number), label=row.method)
        if len(accuracies) > 1:
            spread = accuracies.std(0, ddof=1)
            low, high = mean - spread, mean + spread
            axes.fill_between(rounds, low, high, color=colour, alpha=0.12, lw=0)


def _canvas(name: str, title: str, rows: Sequence[Row]) -> tuple[Chart, Axes]:
    figure, axes = theme.canvas(3.1, legend=-(-len(rows) // _columns(rows)))
    return Chart(name, title, figure), axes


def _points(
    chart: Chart,
    axes: Axes,
    rows: Sequence[Row],
    place: Callable[[Row], tuple[float, float]],
    words: Callable[[Row], str],
) -> None:
    for row in rows:
        x, y = place(row)
        axes.scatter(
            [x],
            [y],
            s=34,
            color=theme.colour(row.number),
            marker=theme.marker(row.number),
            label=row.method,
            gid=chart.tip([words(row)]),
            zorder=3,
            clip_on=False,
        )


def _columns(rows: Sequence[Row]) -> int:
    longest = max(len(row.method) for row in rows)
    return 3 if longest <= 15 else 2 if longest <= 24 else 1


def _cost_tip(row: Row) -> str:
    return (
        f"{row.method}, {row.kind} model\n{100 * row.accuracy:.1f} %, "
        f"{quantity(row.bytes_per_round, 'B')} a round"
    )


def _gain_tip(row: Row) -> str:
    low, high = row.interval or (0, 0)
    return (
        f"{row.method}, {row.kind} model\n{_signed(row.gain or 0)} points above local "
        f"({_signed(low)} to {_signed(high)})\n{row.harmed_percent:.0f} % of the clients harmed"
    )


def _signed(value: float) -> str:
    return f"{value:+.1f}".replace("-", "−")
