"""What the studies of the package found, as blocks of a page: from records in results/studies.

After 'perfed study NAME', copy its records into results/studies/NAME/records. In a page,
``<!-- begin: study-NAME -->`` is then all of its tables.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import get_args

import matplotlib as mpl
from committed import RESULTS, machine
from matplotlib.figure import Figure

from perfed.config import STUDIES, preset_names, read_mapping
from perfed.core import layout
from perfed.core.algorithm import Sends, algorithms
from perfed.report.charts import plain_log
from perfed.report.study import by_gain, taught
from perfed.report.theme import COLOURS, RC
from perfed.runs.design import Conduct, design
from perfed.runs.study import machines
from perfed.runs.study_tables import Outcome, Row
from perfed.runs.tables import HARM

COLOUR_OF_SENDS = dict(zip(get_args(Sends), COLOURS, strict=False))


def outcome_of(name: str) -> Outcome:
    conduct = Conduct(design(read_mapping(name, STUDIES)), RESULTS / "studies" / name)
    return Outcome(conduct.design, conduct.everything())


def tables(name: str) -> str:
    outcome = outcome_of(name)
    shown = layout.markdown(outcome.tables().values())
    return "\n\n".join([shown, *map(machine, machines(outcome.records()))])


def overview(name: str) -> Figure:
    """All methods: what they gain in each setting, whom they harm, and what they send. Those that
    ran in every setting are above the others; in both parts the largest mean gain is on top."""
    sections = outcome_of(name).sections
    found = by_gain(map(taught, sections))
    everywhere = sum(len(rows) == len(sections) for rows in found.values())
    places = {method: -n - (n >= everywhere) for n, method in enumerate(found)}
    with mpl.rc_context(RC):
        drawing = Figure(figsize=(10, 0.21 * len(found) + 1.6), layout="constrained")
        axes = drawing.subplots(1, len(sections) + 2, sharey=True)
        *by_setting, harm, sent = axes
        for section, axis in zip(sections, by_setting, strict=True):
            axis.set_title(section.name)
            axis.set_xlabel("points above local")
            for row in section.rows:
                if row.method in places and row.interval:
                    height = places[row.method]
                    axis.plot(row.interval, [height] * 2, color=colour(row.method), lw=1.2)
                    dot(axis, row.gain or 0, height, row.method)
        for method, rows in found.items():
            dot(harm, mean_harm(rows), places[method], method)
            sent_by = [row.bytes_per_round for row in rows if row.bytes_per_round]
            if sent_by:
                dot(sent, statistics.mean(sent_by), places[method], method)
        for axis in (*by_setting, harm):
            axis.axvline(0, color="#6a6a6a", linewidth=0.8)
        ends = [axis.get_xlim() for axis in by_setting]
        for axis in by_setting:  # one scale
            axis.set_xlim(min(low for low, _ in ends), max(high for _, high in ends))
        harm.set_title("harmed")
        harm.set_xlabel(f"lose over {HARM:g} points, %")
        plain_log(sent, "B")
        sent.set_title("sent")
        sent.set_xlabel("bytes a round")
        axes[0].set_yticks([*places.values()], [*found])
        axes[0].set_ylim(min(places.values()) - 0.7, 0.7)
        there = {algorithms[method].sends for method in found}
        for kind, shade in COLOUR_OF_SENDS.items():
            if kind in there:
                axes[0].plot([], [], "o", color=shade, label=kind)
        drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return drawing


def colour(method: str) -> str:
    return COLOUR_OF_SENDS[algorithms[method].sends]


def dot(axis: mpl.axes.Axes, x: float, y: float, method: str) -> None:
    axis.plot([x], [y], "o", ms=5, color=colour(method), clip_on=False, zorder=3)


def mean_harm(rows: Sequence[Row]) -> float:
    return statistics.mean(row.harmed_percent or 0 for row in rows)


BLOCKS = {f"study-{name}": partial(tables, name) for name in preset_names(STUDIES)}
FIGURES = {"bench-digits": partial(overview, "bench-digits")}
