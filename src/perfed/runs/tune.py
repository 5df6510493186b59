"""A search over settings by validation accuracy; every trial is kept.

Lists of values are tried one after another; with a range among them, each trial is suggested by
those before it (:mod:`perfed.runs.sampling`).

Test accuracy is not looked at. Where an algorithm uses validation samples itself, half of them are
kept from it. Seeds are by default none of those that results are reported on, so
that neither the partition nor the public set of a reported run had a part in the choice.
"""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from perfed.config import Comparison, Experiment, parse, set_key
from perfed.core.errors import ConfigError
from perfed.core.layout import Table
from perfed.core.registry import number_text
from perfed.core.streams import numpy_stream
from perfed.engines import Execution
from perfed.runs.coordinator import Callback
from perfed.runs.directory import RunDirectory
from perfed.runs.result import headline
from perfed.runs.sampling import Choice, Pruning, Range, Told, suggestion
from perfed.runs.study import Record, Shard, Study

SEED = 1000
NAME = "tune"  # of the files that hold the outcome
FILE = f"{NAME}.json"


@dataclass(frozen=True)
class Search:
    """``values`` with each choice of ``grid``, or ``trials`` of them: drawn at random, or where
    the grid has a range, each suggested by those before it."""

    values: Mapping[str, Any]
    grid: Mapping[str, Sequence[Any] | Range]
    seeds: tuple[int, ...] = (SEED,)
    trials: int | None = None
    as_given: bool = False
    """Whether ``values`` as they are, without a choice, are the first trial."""
    suggested: tuple[Choice, ...] = ()
    """So far, where the grid has a range."""

    def __post_init__(self) -> None:
        if self._ranges() and self.trials is None:
            raise ConfigError("say how many settings to try: a range has no last one", "--trials")
        for key, values in self.grid.items():
            if isinstance(values, Range):
                continue
            for number, value in enumerate(values):
                if value in values[:number]:
                    raise ConfigError(f"{value} is there twice; give it once", f"--grid {key}")

    def choices(self) -> list[Choice]:
        return list(self._choices)

    @cached_property
    def _choices(self) -> list[Choice]:
        if self._ranges():
            return list(self.suggested) or [suggestion(self.grid, self.seeds[0], [])]
        return self._listed(self.trials)

    def _listed(self, trials: int | None = None) -> list[Choice]:
        """Without a sampler; of a range, its ends."""
        keys = list(self.grid)
        everything = [
            tuple(zip(keys, values, strict=True))
            for values in itertools.product(*map(_values, self.grid.values()))
        ]
        first: list[Choice] = [()] if self.as_given else []
        if first:
            given = self.experiment((), self.seeds[0])
            everything = [c for c in everything if self.experiment(c, self.seeds[0]) != given]
        if trials is None or trials >= len(first) + len(everything):
            return first + everything
        left = trials - len(first)
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

    def run(
        self,
        folder: Path,
        how: Execution,
        callbacks: Sequence[Callback] = (),
        shard: Shard | None = None,
        seconds: float = float("inf"),
        side_by_side: bool = False,
    ) -> Search:
        """Run what has no record yet, as a study does. The search as it then is: with all that was
        suggested so far."""
        if not self._ranges():
            self.study(folder).run(how, callbacks, shard, seconds, side_by_side)
            return self
        if shard and shard.of > 1:
            raise ConfigError(
                "a range is searched one trial after another, not in shards", "--shard"
            )
        for choice in self._listed():  # what cannot run must not start
            self.experiment(choice, self.seeds[0])
        return self._run_suggested(folder, how, callbacks, seconds, side_by_side)

    def _run_suggested(
        self,
        folder: Path,
        how: Execution,
        callbacks: Sequence[Callback],
        seconds: float,
        side_by_side: bool,
    ) -> Search:
        """What has a record is told to the sampler without a run."""
        end = time.monotonic() + seconds
        suggested: list[Choice] = []
        told: list[Told] = []
        complete: dict[int, list[dict[int, float]]] = {seed: [] for seed in self.seeds}
        with how.several_runs():
            while len(told) < (self.trials or 0):
                choice = suggestion(self.grid, self.seeds[0], told)
                trial = replace(self, suggested=(choice,))
                watching = [*callbacks, Pruning(complete)]
                records = trial._run_trial(folder, how, watching, end, side_by_side)
                row = self._row(choice, records)
                if row and choice not in suggested:
                    for seed in self.seeds if row["validation_accuracy"] else ():
                        complete[seed].append(_curve(records[self.name(choice, seed)]))
                suggested.append(choice)
                if row is None:  # the time is over
                    break
                told.append(_told(choice, row))
        return replace(self, suggested=tuple(dict.fromkeys(suggested)))

    def _run_trial(
        self,
        folder: Path,
        how: Execution,
        callbacks: Sequence[Callback],
        end: float,
        side_by_side: bool,
    ) -> dict[str, Record]:
        """One seed after another, unless they are to run side by side, until one is pruned."""
        for seeds in [self.seeds] if side_by_side else [(seed,) for seed in self.seeds]:
            study = replace(self, seeds=seeds).study(folder)
            study.run(how, callbacks, None, end - time.monotonic(), side_by_side)
            if any("pruned" in record for record in study.records().values()):
                break
        return self.study(folder).records()

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
        found = (self._row(choice, records) for choice in self.choices())
        rows = [row for row in found if row is not None]
        rows.sort(key=lambda row: -_mean(row["validation_accuracy"]))
        return {
            "algorithm": self.algorithm(),
            "grid": self._plain_grid(),
            "seeds": list(self.seeds),
            "of": self.trials if self._ranges() else len(self.choices()),
            "trials": rows,
            "config": self.config(),
            "environment": next((r["environment"] for r in records.values()), {}),
        }

    def _row(self, choice: Choice, records: Mapping[str, Record]) -> dict[str, Any] | None:
        """What a choice gave; None where not all its seeds have run, and none was pruned."""
        runs = [records.get(self.name(choice, seed)) for seed in self.seeds]
        found = [run for run in runs if run is not None]
        pruned = [
            {"rounds": run["pruned"], "validation_accuracy": list(_curve(run).values())[-1]}
            for run in found
            if "pruned" in run
        ]
        if len(found) < len(runs) and not pruned:
            return None
        failed = [run["failed"] for run in found if "failed" in run]
        scores = [] if failed or pruned else [validation_accuracy(run) for run in found]
        row = {"choice": dict(choice), "validation_accuracy": scores, "failed": failed}
        return row | ({"pruned": pruned} if pruned else {})

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

    def _ranges(self) -> bool:
        return any(isinstance(values, Range) for values in self.grid.values())

    def _plain_grid(self) -> dict[str, Any]:
        return {
            key: str(values) if isinstance(values, Range) else list(values)
            for key, values in self.grid.items()
        }


def _values(values: Sequence[Any] | Range) -> Sequence[Any]:
    return (values.low, values.high) if isinstance(values, Range) else values


def _told(choice: Choice, row: Mapping[str, Any]) -> Told:
    reached = {r["rounds"]: r["validation_accuracy"] for r in row.get("pruned", ())}
    scores = row["validation_accuracy"]
    return Told(choice, statistics.mean(scores) if scores else None, reached)


def _curve(record: Record) -> dict[int, float]:
    """By round, the validation accuracy of the model that a client would use."""
    return {number: validation for number, _, validation in headline(record["curve"])}


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
    trials = [trial for trial in result["trials"] if trial["validation_accuracy"]]
    if not trials:
        raise ConfigError("no trial has a result")
    choice: dict[str, Any] = trials[0]["choice"]
    return choice


def tables(result: Mapping[str, Any]) -> list[Table]:
    keys = list(result["grid"])
    rows = []
    for trial in result["trials"]:
        choice = [shown_value(trial["choice"].get(key, "as given")) for key in keys]
        rows.append([*choice, _shown_score(trial)])
    note = f"Mean validation accuracy in %, after the last round, seeds {result['seeds']}. "
    if result["config"]["split"].get("second_validation"):
        note += "The algorithm saw half of the validation samples, these are of the other half. "
    if any(trial.get("pruned") for trial in result["trials"]):
        note += "Pruned: stopped early, when below the median of earlier trials. "
    note += f"{len(rows)} of {result['of']} settings tried; of equals, the first counts."
    title = f"Settings of {result['algorithm']}"
    return [Table(title, [*keys, "validation accuracy"], rows, note, names=0)]


def _shown_score(trial: Mapping[str, Any]) -> str:
    if trial["failed"]:
        return "diverged"
    for early in trial.get("pruned", ()):
        reached = 100 * early["validation_accuracy"]
        return f"{reached:.1f}, pruned after round {early['rounds']}"
    return f"{100 * _mean(trial['validation_accuracy']):.1f}"


def shown_value(value: Any) -> str:
    """So that ``--set`` takes it for the same."""
    return number_text(value) if value is None or isinstance(value, float) else str(value)


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else float("-inf")
