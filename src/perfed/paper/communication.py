"""Accuracy against communication, for all methods of Table 1: the paper's central picture.

Left as the paper prints it, right from runs. What crosses is counted as the paper does: every
uplink, a broadcast once, and nothing of what is sent once before the first round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perfed.paper.published import Row
from perfed.paper.tables import COST_ROUNDS, Finding, TableRun, findings, method_name
from perfed.runs.study import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

UNIT = 1e7  # parameters, as in the paper's cost column


@dataclass(frozen=True)
class Curve:
    """A row's accuracy, mean over seeds, as communication goes on."""

    row: Row
    rounds: int
    cost: tuple[float, ...]
    """In 10⁷ parameters, at each evaluation; all zero where nothing is sent."""
    accuracy: tuple[float, ...]
    """In %, at each evaluation."""
    best: float
    """In %, in each seed's best test round, which is what the paper reports."""


def curves(
    studies: Sequence[tuple[TableRun, Mapping[str, Record]]], fraction: float
) -> list[Curve]:
    """One for each row that has runs, from the first of ``studies`` that has them."""
    found: dict[str, Curve] = {}
    for chosen, records in studies:
        for finding in findings(chosen, records):
            if finding.fraction == fraction and finding.row.label not in found:
                found[finding.row.label] = _curve(finding, chosen.rounds)
    order = [row.label for row in studies[0][0].rows]
    return sorted(found.values(), key=lambda curve: order.index(curve.row.label))


def _curve(finding: Finding, rounds: int) -> Curve:
    by_seed = [
        {int(point[0]): point[1] for point in record["curve"][finding.row.kind]}
        for record in finding.records
    ]
    evaluated = [number for number in by_seed[0] if all(number in seed for seed in by_seed)]
    return Curve(
        finding.row,
        rounds,
        tuple(finding.cost_of(number + 1) / UNIT for number in evaluated),
        tuple(100 * statistics.mean(seed[number] for seed in by_seed) for number in evaluated),
        100 * statistics.mean(finding.values("best_test")),
    )


# Colours are Okabe and Ito's; the usual methods have those that they have in reports. A method with
# clusters shows how many.
_LOOKS = {
    "fedavg": ("#E69F00", "o"),
    "fedavg-ft": ("#E69F00", "s"),
    "fedprox": ("#777777", "^"),
    "scaffold": ("#777777", "v"),
    "feddf": ("#777777", "P"),
    "per-fedavg": ("#000000", "X"),
    "ditto": ("#CC79A7", "D"),
    "fedfomo": ("#009E73", "p"),
    "fedfomo-trained": ("#009E73", "<"),
    "hypcluster": ("#56B4E9", ""),
    "perfed-ckt": ("#0072B2", ""),
    "perfed-kin": ("#D55E00", "*"),
}
_WITHOUT_COST = {"majority": ":", "local": "--"}


def plot(shown: Sequence[Curve], rows: Sequence[Row], fraction: float) -> Figure:
    """Left, what the paper prints of ``rows``; right, ``shown``."""
    from matplotlib.figure import Figure  # not pyplot: a notebook's own backend stays as it is

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    for row in rows:
        _published(left, row, fraction)
    longest = max(curve.rounds for curve in shown)
    for curve in shown:
        _run(right, curve)
    _tell_shorter(right, [curve for curve in shown if curve.rounds < longest])
    left.set_title(f"the paper: best test round, cost of {COST_ROUNDS} rounds", fontsize=10)
    right.set_title(f"here: round by round to the last of {longest}", fontsize=10)
    for axis in (left, right):
        axis.set(xscale="log", ylim=(0, 100), xlabel="communication (10⁷ parameters)")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    left.set_ylabel("test accuracy, mean over clients (%)")
    names = {
        label: handle
        for axis in (left, right)
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        names.values(), names.keys(), loc="outside right upper", frameon=False, fontsize=8
    )
    return figure


def _published(axis: Axes, row: Row, fraction: float) -> None:
    accuracy, cost = row.published(fraction), row.published_cost(fraction)
    if accuracy is None:
        return
    if cost is None:
        _line(axis, row, accuracy[0])
    else:
        _point(axis, row, cost, accuracy[0])


def _run(axis: Axes, curve: Curve) -> None:
    """A line to the last round; a bar from there to the best test round."""
    last = curve.accuracy[-1]
    if not curve.cost[-1]:
        _line(axis, curve.row, last)
        return
    colour, _ = _look(curve.row)
    axis.plot(curve.cost, curve.accuracy, color=colour, alpha=0.35, linewidth=1)
    axis.plot([curve.cost[-1]] * 2, [last, curve.best], color=colour, linewidth=1)
    axis.plot(curve.cost[-1], curve.best, "_", color=colour, markersize=8)
    _point(axis, curve.row, curve.cost[-1], last)


def _tell_shorter(axis: Axes, shorter: Sequence[Curve]) -> None:
    """How many rounds, once for the rows of one algorithm: their points lie side by side."""
    for curve in {curve.row.algorithm["name"]: curve for curve in shorter}.values():
        axis.annotate(
            f"{curve.rounds} rounds",
            (curve.cost[-1], curve.accuracy[-1]),
            xytext=(0, -13),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            color="#444444",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
        )


def _line(axis: Axes, row: Row, accuracy: float) -> None:
    style = _WITHOUT_COST[row.algorithm["name"]]
    axis.axhline(accuracy, color="#444444", linestyle=style, linewidth=1, label=row.label)


def _look(row: Row) -> tuple[str, str]:
    """Colour and marker."""
    if "clusters" in row.algorithm:
        return _LOOKS[row.algorithm["name"]][0], f"${row.algorithm['clusters']}$"
    return _LOOKS[method_name(row.algorithm)]


def _point(axis: Axes, row: Row, cost: float, accuracy: float) -> None:
    colour, marker = _look(row)
    axis.plot(
        cost,
        accuracy,
        marker=marker,
        color=colour,
        markerfacecolor="white" if row.kind == "global" else colour,
        markersize=7,
        linestyle="none",
        label=row.label,
    )


def figures(chosen: TableRun, records: Mapping[str, Record]) -> dict[str, Figure]:
    """One for each fraction of which there are runs, by what its files are called."""
    made = {}
    for fraction in chosen.fractions:
        if shown := curves([(chosen, records)], fraction):
            name = f"{chosen.title}-communication-C{fraction:.3g}"
            made[name] = plot(shown, chosen.rows, chosen.published_fraction(fraction))
    return made
