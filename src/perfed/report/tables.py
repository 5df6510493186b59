"""Tables, made from the summaries of runs and from nothing else."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from perfed.core.metrics import MODEL_NAMES
from perfed.report.layout import Table

HEADER = (
    "algorithm",
    "model",
    "accuracy",
    "chosen",
    "best test*",
    "worst 10 %",
    "parameters",
    "bytes",
)
FOOTNOTE = """\
Test accuracy in %, mean over all clients, after the last round. chosen: in the
round that was best on validation data. worst 10 %: mean of the tenth of the
clients that fare worst. *The best test round, which the paper reports, is chosen
by test data: it flatters, and is no result. Parameters are counted as the paper
does (a broadcast once), bytes as sent."""


@dataclass(frozen=True)
class Row:
    """One algorithm and model kind, over its seeds."""

    algorithm: str
    kind: str
    summaries: tuple[dict[str, Any], ...]

    def values(self, get: Callable[[dict[str, Any]], float]) -> list[float]:
        return [get(summary["models"][self.kind]) for summary in self.summaries]

    def traffic(self, *names: str) -> float:
        totals = [float(sum(s["traffic"][name] for name in names)) for s in self.summaries]
        return statistics.mean(totals)


def rows(summaries: Sequence[dict[str, Any]]) -> list[Row]:
    """Grouped by algorithm (in the order given), then by model kind."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for summary in summaries:
        for kind in summary["models"]:
            grouped.setdefault((summary["algorithm"], kind), []).append(summary)
    return [Row(name, kind, tuple(group)) for (name, kind), group in grouped.items()]


def cells(row: Row) -> list[str]:
    return [
        row.algorithm,
        MODEL_NAMES[row.kind],
        spread(row.values(lambda m: m["last"]["test_accuracy"])),
        spread(row.values(lambda m: m["chosen"]["test_accuracy"])),
        spread(row.values(lambda m: m["best_test"]["test_accuracy"])),
        spread(row.values(lambda m: m["last"]["test_accuracy_worst_decile"])),
        quantity(row.traffic("up_parameters", "down_parameters")),
        quantity(row.traffic("up_bytes", "down_bytes"), "B"),
    ]


def spread(values: Sequence[float]) -> str:
    """Percent: the mean, and with several values ± their sample standard deviation."""
    mean = f"{100 * statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {100 * statistics.stdev(values):.1f}"


def quantity(value: float, unit: str = "") -> str:
    """``1.23 M``: three digits and a prefix; a dash for nothing."""
    if value == 0:
        return "–"
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def summary_table(summaries: Sequence[dict[str, Any]]) -> str:
    """Plain text, aligned."""
    return Table("", HEADER, [cells(row) for row in rows(summaries)], FOOTNOTE, names=2).text()
