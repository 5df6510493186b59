"""A search over settings by validation accuracy; every trial is kept.

Test accuracy is not looked at. Seeds are by default none of those that results are reported on, so
that neither the partition nor the public set of a reported run had a part in the choice.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfed.config import Comparison, Experiment, apply_override, parse
from perfed.core.errors import ConfigError
from perfed.core.streams import numpy_stream
from perfed.report.layout import Table
from perfed.runs.result import headline
from perfed.runs.study import Record, Study

SEED = 1000
Choice = tuple[tuple[str, Any], ...]
"""One value for each key of the grid."""


@dataclass(frozen=True)
class Search:
    """``values`` with each choice of ``grid``, or ``trials`` of them drawn at random."""

    values: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    seeds: tuple[int, ...] = (SEED,)
    trials: int | None = None

    def choices(self) -> list[Choice]:
        keys = list(self.grid)
        everything = [
            tuple(zip(keys, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]
        if self.trials is None or self.trials >= len(everything):
            return everything
        drawn = numpy_stream(0, "tune").permutation(len(everything))[: self.trials]
        return [everything[number] for number in sorted(drawn)]

    def study(self, folder: str | Path) -> Study:
        return Study(
            folder,
            {
                self.name(choice, seed): self.experiment(choice, seed)
                for choice in self.choices()
                for seed in self.seeds
            },
        )

    def name(self, choice: Choice, seed: int) -> str:
        shown = [f"{key.rpartition('.')[2]}={value}" for key, value in choice]
        return "-".join([*shown, f"seed{seed}"])

    def experiment(self, choice: Choice, seed: int) -> Experiment:
        values = copy.deepcopy(dict(self.values))
        values.pop("seeds", None)
        if "algorithms" in values:
            raise ConfigError("one algorithm is tuned at a time: name it with --algorithm")
        for key, value in choice:
            apply_override(values, f"{key}={value}")
        experiment = parse(values | {"seed": seed})
        assert not isinstance(experiment, Comparison)
        return experiment

    def result(self, records: Mapping[str, Record]) -> dict[str, Any]:
        """Every choice with a record of each seed, the best first."""
        rows: list[dict[str, Any]] = []
        for choice in self.choices():
            runs = [records.get(self.name(choice, seed)) for seed in self.seeds]
            found = [run for run in runs if run is not None]
            if len(found) < len(runs):
                continue
            failed = [run["failed"] for run in found if "failed" in run]
            scores = [] if failed else [validation_accuracy(run) for run in found]
            rows.append({"choice": dict(choice), "validation_accuracy": scores, "failed": failed})
        rows.sort(key=lambda row: -_mean(row["validation_accuracy"]))
        return {
            "algorithm": self.experiment(self.choices()[0], self.seeds[0]).algorithm.label(),
            "grid": {key: list(values) for key, values in self.grid.items()},
            "seeds": list(self.seeds),
            "of": len(self.choices()),
            "trials": rows,
            "config": self.experiment(self.choices()[0], self.seeds[0]).to_mapping(),
            "environment": next((r["environment"] for r in records.values()), {}),
        }


def validation_accuracy(record: Record) -> float:
    """Mean over all clients after the last round, of the model that a client would use."""
    accuracy: float = headline(record["summary"]["models"])["last"]["validation_accuracy"]
    return accuracy


def best(result: Mapping[str, Any]) -> dict[str, Any]:
    """The choice with the highest validation accuracy."""
    trials = [trial for trial in result["trials"] if not trial["failed"]]
    if not trials:
        raise ConfigError("no trial has a result")
    choice: dict[str, Any] = trials[0]["choice"]
    return choice


def tables(result: Mapping[str, Any]) -> list[Table]:
    keys = list(result["grid"])
    rows = []
    for trial in result["trials"]:
        score = _mean(trial["validation_accuracy"])
        shown = "diverged" if trial["failed"] else f"{100 * score:.1f}"
        rows.append([*(shown_value(trial["choice"][key]) for key in keys), shown])
    note = f"Mean validation accuracy in %, after the last round, seeds {result['seeds']}. "
    note += f"{len(rows)} of {result['of']} settings tried; of equals, the first counts."
    title = f"Settings of {result['algorithm']}"
    return [Table(title, [*keys, "validation accuracy"], rows, note, names=0)]


def shown_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else float("-inf")
