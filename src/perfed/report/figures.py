"""Figures, made from run directories and from nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from perfed.core.method_numbers import method_numbers
from perfed.report.theme import colour, style
from perfed.runs.result import Result, headline_kind

if TYPE_CHECKING:
    import pandas as pd

LEGEND_COLUMNS = 4


def plot_comparison(results: Sequence[Result], path: Path) -> Path:
    """Mean test accuracy by round and by parameters communicated; bands are ± one standard
    deviation over seeds."""
    from matplotlib.figure import Figure  # not pyplot: a notebook's own backend stays as it is

    curves = _curves(results)
    legend_rows = -(-len(curves) // LEGEND_COLUMNS)
    height = 3.6 + 0.25 * legend_rows
    figure = Figure(figsize=(10, height))
    by_round, by_cost = figure.subplots(1, 2, sharey=True)
    numbers = method_numbers(label for label, _ in curves)
    kinds = Counter(label for label, _ in curves)
    for (method, kind), frame in curves.items():
        several = kinds[method] > 1
        label = f"{method}, {kind}" if several else method
        second = several and kind != headline_kind(("personal", "global"))
        look = {"color": colour(numbers[method]), "ls": style(numbers[method], second)}
        grouped = frame.groupby("round")
        mean = 100 * grouped["test_accuracy"].mean()
        deviation = 100 * grouped["test_accuracy"].std(ddof=1).fillna(0)
        by_round.plot(mean.index + 1, mean, **look, label=label)
        by_round.fill_between(
            mean.index + 1,
            mean - deviation,
            mean + deviation,
            color=look["color"],
            alpha=0.15,
            lw=0,
        )
        cost = grouped["parameters"].mean()
        if cost.max() > 0:
            by_cost.plot(cost, mean, **look)
            by_cost.plot(cost.iloc[-1], mean.iloc[-1], "o", color=look["color"])
        else:
            by_cost.axhline(mean.iloc[-1], color=look["color"], ls=":")
    by_round.set(xlabel="communication round", ylabel="test accuracy, mean over clients (%)")
    by_cost.set(xlabel="parameters communicated so far", xscale="log")
    by_cost.set_title("dotted: nothing is communicated", fontsize=9, loc="right", color="#666666")
    for axes in (by_round, by_cost):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    figure.legend(loc="lower center", ncols=LEGEND_COLUMNS, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, (0.1 + 0.22 * legend_rows) / height, 1, 1))
    figure.savefig(path, dpi=150)
    return path


def _curves(results: Sequence[Result]) -> dict[tuple[str, str], pd.DataFrame]:
    """All seeds' rounds, by algorithm and model kind."""
    import pandas as pd

    frames: dict[tuple[str, str], list[pd.DataFrame]] = {}
    for result in results:
        frame = result.per_round()
        frame["parameters"] = frame["total_up_parameters"] + frame["total_down_parameters"]
        for kind in frame["model"].unique():
            key = (result.experiment.algorithm.label(), str(kind))
            frames.setdefault(key, []).append(frame[frame["model"] == kind])
    return {key: pd.concat(group) for key, group in frames.items()}
