"""A search over settings by validation accuracy; every trial is kept.

Test accuracy is not looked at. Where an algorithm uses validation samples itself, half of them are
kept from it. Seeds are by default none of those that results are reported on, so
that neither the partition nor the public set of a reported run had a part in the choice.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from perfed.config import Comparison, Experiment, parse, set_key
from perfed.core.errors import ConfigError
from perfed.core.layout import Table
from perfed.core.streams import numpy_stream
from perfed.runs.directory import RunDirectory
from perfed.runs.result import headline
from perfed.runs.study import Record, Study

SEED = 1000
NAME = "tune"  # of the files that hold the outcome
FILE = f"{NAME}.json"
Choice = tuple[tuple[str, Any], ...]
"""One value for each key of the grid."""


@dataclass(frozen=True)
class Search:
    """``values`` with each choice of ``grid``, or ``trials`` of them drawn at random."""

    values: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any]]
    seeds: tuple[int, ...] = (SEED,)
    trials: int | None = None
    as_given: bool = False
    """Whether ``values`` as they are, without a choice, are the first trial."""

    def __post_init__(self) -> None:
        for key, values in self.grid.items():
            for number, value in enumerate(values):
                if value in values[:number]:
                    raise ConfigError(f"{value} is there twice; give it once", f"--grid {key}")

    def choices(self) -> list[Choice]:
        return list(self._choices)

    @cached_property
    def _choices(self) -> list[Choice]:
        keys = list(self.grid)
        everything = [
            tuple(zip(keys, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]
        first: list[Choice] = [()] if self.as_given else []
        if first:
            given = self.experiment((), self.seeds[0])
            everything = [c for c in everything if self.experiment(c, self.seeds[0]) != given]
        if self.trials is None or self.trials >= len(first) + len(everything):
            return first + everything
        left = self.trials - len(first)
        drawn = numpy_stream(0, "tune").permutation(len(everything))[:left]
        return first + [everything[number] for number in sorted(drawn)]

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
            set_key(values, key, value, f"--grid {key}")
        experiment = parse(values | {"seed": seed})
        assert not isinstance(experiment, Comparison)
        return with_second_validation(experiment)

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
            "algorithm": self.algorithm(),
            "grid": self._plain_grid(),
            "seeds": list(self.seeds),
            "of": len(self.choices()),
            "trials": rows,
            "config": self.config(),
            "environment": next((r["environment"] for r in records.values()), {}),
        }

    def algorithm(self) -> str:
        """What is tuned, with the options that it was given and that are not searched."""
        experiments = [self.experiment(choice, self.seeds[0]) for choice in self.choices()]
        names = dict.fromkeys(e.algorithm.registered_name for e in experiments)
        given = self.values.get("algorithm")
        options = [
            f"{key}={shown_value(value)}"
            for key, value in (given.items() if isinstance(given, Mapping) else ())
            if key != "name" and f"algorithm.{key}" not in self.grid
        ]
        return ", ".join(names) + (f" ({', '.join(options)})" if options else "")

    def config(self) -> dict[str, Any]:
        """What all trials have in common: neither what is searched nor the seed."""
        config = self._first().to_mapping()
        for key in (*self.grid, "seed"):
            *path, last = key.split(".")
            node = config
            for level in path:
                node = node.get(level, {})
            node.pop(last, None)
        return config

    def check_folder(self, folder: Path) -> None:
        """A folder with another search is not written to; one with this search is gone on with."""
        if not (folder / FILE).is_file():
            return
        directory = RunDirectory(folder)
        with directory.reading():
            difference = self._difference(directory.read_json(FILE))
        if difference:
            raise ConfigError(
                f"{folder} holds another search, with {difference}; choose another folder", "--out"
            )

    def _difference(self, earlier: Mapping[str, Any]) -> str:
        """What another search's result says it was made with, if that is not the same as here."""
        if earlier["grid"] != json.loads(json.dumps(self._plain_grid())):
            return "another grid"
        if earlier["seeds"] != list(self.seeds):
            return "other seeds"
        # Parsed, so that options that were not there then have their defaults.
        same = replace(self, values=earlier["config"])._first() == self._first()
        return "" if same else "another experiment"

    def _first(self) -> Experiment:
        return self.experiment(self.choices()[0], self.seeds[0])

    def _plain_grid(self) -> dict[str, list[Any]]:
        return {key: list(values) for key, values in self.grid.items()}


def with_second_validation(experiment: Experiment) -> Experiment:
    """Where the algorithm uses validation samples itself, half of them are kept from it, so that
    the choice is by samples that it has not seen."""
    if not experiment.algorithm.uses_validation:
        return experiment
    return replace(experiment, split=replace(experiment.split, second_validation=True))


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
        choice = [shown_value(trial["choice"].get(key, "as given")) for key in keys]
        rows.append([*choice, shown])
    note = f"Mean validation accuracy in %, after the last round, seeds {result['seeds']}. "
    if result["config"]["split"].get("second_validation"):
        note += "The algorithm saw half of the validation samples, these are of the other half. "
    note += f"{len(rows)} of {result['of']} settings tried; of equals, the first counts."
    title = f"Settings of {result['algorithm']}"
    return [Table(title, [*keys, "validation accuracy"], rows, note, names=0)]


def shown_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else float("-inf")
