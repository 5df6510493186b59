"""What a study file says: methods × settings × seeds, and how each method's settings are chosen.

    name: mine
    rounds: 20                             # keys of an experiment: all runs have them
    data: {name: digits, public: 400}
    methods:
      - local
      - {name: perfed-ckt, grid: {weight: [0.5, 2]}}
    settings:                              # each changes some keys
      groups: {partition: {name: groups, groups: 3}}
      Dirichlet: {partition: {name: dirichlet, alpha: [0.01, 0.1]}}   # a list: one setting for each
    seeds: [0, 1, 2]
    tuning: {trials: 2}

A method in a setting is a :class:`Cell`: its trials, then a run for each seed with the choice.
Shards divide cells, so that whoever makes the trials makes the runs. All that is kept are records
(:mod:`perfed.runs.study`); the choice is made from those of the trials, by validation accuracy.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from perfed.config import Comparison, Experiment, parse, set_key
from perfed.core.algorithm import Algorithm, algorithms, reference_algorithm
from perfed.core.declaration import sends_own_weights
from perfed.core.errors import ConfigError, cut, did_you_mean, shown
from perfed.core.schema import Options, from_mapping, option, plain
from perfed.core.tensorfile import write_atomically
from perfed.engines import Execution
from perfed.runs import sampling, tune
from perfed.runs.coordinator import Callback
from perfed.runs.simulation import AUTOMATIC, Simulation
from perfed.runs.study import Record, Shard, Study, folder_name
from perfed.runs.tune import Search

ALL = "all"
LINK = "link"  # stands for keys of an experiment
OWN_KEYS = ("methods", "settings", "seeds", "tuning")
NOT_HERE = {"algorithm": "methods", "algorithms": "methods", "seed": "seeds"}
MOST_SETTINGS = 200
TUNING_FILE = "tuning.json"
Values = dict[str, Any]
Choice = Mapping[str, Any]
"""By dotted key."""


@dataclass(frozen=True)
class Tuning(Options):
    """How the settings of methods are chosen."""

    seed: int = option(tune.SEED, "whose validation data choose; none of the study's seeds", ge=0)
    trials: int = option(4, "of every method that has something to choose, in every setting", ge=2)
    rounds: int = option(0, "rounds of a trial; 0: as many as a run has", ge=0)
    grid: Any = option(
        None, "values to try with all methods: training.learning_rate, or an option that some have"
    )


@dataclass(frozen=True)
class Method:
    """An algorithm with its options, and the values that are tried instead."""

    name: str
    algorithm: Algorithm
    grid: Mapping[str, Sequence[Any]]
    """By dotted key of an experiment."""
    of_all: bool = False
    """It is here because the file says 'all', not by its name."""


@dataclass(frozen=True)
class Design:
    """A study file, checked."""

    name: str
    about: str
    methods: tuple[Method, ...]
    settings: Mapping[str, Values]
    """By name, all keys of an experiment that are not the default."""
    seeds: tuple[int, ...]
    tuning: Tuning | None

    def cells(self, methods: Sequence[str] = (), settings: Sequence[str] = ()) -> list[Cell]:
        """All, or those of some methods and settings; setting by setting."""
        known = [method.name for method in self.methods]
        for wanted, names, where in (
            (methods, known, "--methods"),
            (settings, list(self.settings), "--settings"),
        ):
            for name in wanted:
                if name not in names:
                    raise ConfigError(f"'{cut(name)}' is none of {', '.join(names)}", where)
        return [
            cell
            for cell in self._cells
            if (cell.setting in settings or not settings)
            and (cell.method.name in methods or not methods)
        ]

    @cached_property
    def _cells(self) -> list[Cell]:
        return [Cell(self, setting, m) for setting in self.settings for m in self.methods]


@dataclass(frozen=True)
class Cell:
    """One method in one setting."""

    design: Design
    setting: str
    method: Method

    @cached_property
    def left_out(self) -> str:
        """Why the method cannot be run in this setting, as far as that can be told without data."""
        try:
            experiment = self.experiment(self.design.seeds[0], {})
        except ConfigError as error:
            return str(error)
        networks = len(experiment.models.architectures)
        weights = sends_own_weights(self.method.algorithm.messages())
        if self.method.of_all and networks > 1 and weights:
            return f"it averages weights, and clients have {networks} different networks"
        return ""

    @cached_property
    def search(self) -> Search | None:
        """Its trials; nothing where there is nothing to choose."""
        tuning, values = self.design.tuning, self._values()
        if tuning is None or not self.method.grid or self.left_out:
            return None
        rounds = tuning.rounds or self.experiment(0, {}).rounds
        values |= {"rounds": rounds, "evaluate_every": rounds}
        seeds = (tuning.seed,)
        where = f"methods: {self.method.name}"
        try:
            search = Search(values, self.method.grid, seeds, tuning.trials, as_given=True)
            found = len(search.choices())
        except ConfigError as error:
            raise ConfigError(str(error), where) from None
        if found < tuning.trials:
            raise ConfigError(
                f"its grid has {found} different choices, and every method has {tuning.trials} "
                "trials: give it more values, or all methods fewer trials (tuning.trials)",
                where,
            )
        return search

    def trials(self) -> dict[str, Experiment]:
        if self.search is None:
            return {}
        seed = self.search.seeds[0]
        return {
            self.trial_name(choice): self.search.experiment(choice, seed)
            for choice in self.search.choices()
        }

    def trial_name(self, choice: sampling.Choice) -> str:
        assert self.search is not None
        return self.run_name(f"tune-{self.search.name(choice, self.search.seeds[0])}")

    def run_name(self, which: int | str) -> str:
        which = f"seed{which}" if isinstance(which, int) else which
        return folder_name(f"{self.setting}-{self.method.name}-{which}")

    def runs(self, choice: Choice) -> dict[int, Experiment]:
        """By seed."""
        return {seed: self.experiment(seed, choice) for seed in self.design.seeds}

    def experiment(self, seed: int, choice: Choice) -> Experiment:
        values = self._values()
        for key, value in choice.items():
            set_key(values, key, value, key)
        return _experiment(values | {"seed": seed})

    def _values(self) -> Values:
        values = copy.deepcopy(self.design.settings[self.setting])
        return values | {"algorithm": plain(self.method.algorithm)}


@dataclass(frozen=True)
class Found:
    """What has been found of a cell so far."""

    cell: Cell
    left_out: str
    tuned: Mapping[str, Any] | None
    """The trials, as :meth:`Search.result` has them; nothing where there is nothing to choose."""
    choice: Choice | None
    """Nothing as long as trials are missing."""
    records: Mapping[int, Record]
    """Of finished runs, by seed."""
    failed: Mapping[int, str]

    @property
    def missing(self) -> list[int]:
        return [s for s in self.cell.design.seeds if s not in self.records and s not in self.failed]

    @property
    def complete(self) -> bool:
        return len(self.records) == len(self.cell.design.seeds)


class Conduct:
    """A design in a folder: what of it has been run, and running the rest."""

    def __init__(self, design: Design, folder: str | Path) -> None:
        self.design = design
        self.folder = Path(folder)

    def run(
        self,
        how: Execution = AUTOMATIC,
        callbacks: Sequence[Callback] = (),
        shard: Shard | None = None,
        seconds: float = float("inf"),
        side_by_side: bool = False,
        methods: Sequence[str] = (),
        settings: Sequence[str] = (),
    ) -> None:
        """Run what has no record yet, cell by cell; after ``seconds``, nothing more is begun."""
        ends = time.monotonic() + seconds
        with how.several_runs():
            for cell in self._cells(shard, methods, settings):
                for _ in range(2):  # trials, then runs with what they chose
                    study = self._next(cell, how)
                    left = ends - time.monotonic()
                    if study is None or left <= 0:
                        break
                    study.run(how, callbacks, seconds=left, side_by_side=side_by_side)

    def unfinished(
        self, shard: Shard | None = None, methods: Sequence[str] = (), settings: Sequence[str] = ()
    ) -> list[Cell]:
        """Of these cells, those of which something is to be run."""
        found = map(self.found, self._cells(shard, methods, settings))
        return [one.cell for one in found if one.missing and not one.left_out]

    def _cells(
        self, shard: Shard | None, methods: Sequence[str], settings: Sequence[str]
    ) -> list[Cell]:
        shard = shard or Shard()
        return self.design.cells(methods, settings)[shard.number - 1 :: shard.of]

    def _next(self, cell: Cell, how: Execution) -> Study | None:
        """What is to be run of a cell now."""
        found = self.found(cell)
        if found.left_out or not found.missing:
            return None
        study = self._study(cell, found.choice) if found.choice is not None else self._trials(cell)
        untouched = len(study.missing()) == len(study.experiments)
        if untouched and (reason := self._misfit(cell, how)):
            self._left_out(cell).leave_out(reason)
            return None
        return study

    def _misfit(self, cell: Cell, how: Execution) -> str:
        """Why the method cannot be run with this data and these networks. What is wrong with the
        setting itself, so that local training fails too, is an error."""
        seed = self.design.seeds[0]
        try:
            Simulation(cell.experiment(seed, {}), how=how)
        except ConfigError as error:
            values = self.design.settings[cell.setting] | {
                "algorithm": plain(reference_algorithm())
            }
            Simulation(_experiment(values | {"seed": seed}), how=how)
            return str(error)
        return ""

    def found(self, cell: Cell) -> Found:
        recorded = {} if cell.left_out else self._left_out(cell).records()
        left_out = cell.left_out or next((r["left_out"] for r in recorded.values()), "")
        if left_out:
            return Found(cell, left_out, None, None, {}, {})
        tuned, choice = self._chosen(cell)
        if choice is None:
            return Found(cell, "", tuned, None, {}, {})
        records = self._study(cell, choice).records()
        by_seed = {seed: records.get(cell.run_name(seed)) for seed in self.design.seeds}
        return Found(
            cell,
            "",
            tuned,
            choice,
            {seed: r for seed, r in by_seed.items() if r and "failed" not in r},
            {seed: r["failed"] for seed, r in by_seed.items() if r and "failed" in r},
        )

    def everything(self) -> list[Found]:
        return [self.found(cell) for cell in self.design.cells()]

    def write_choices(self, found: Sequence[Found]) -> Path:
        """How each method's settings were chosen, with every trial."""
        tuning = self.design.tuning
        rows = [
            {
                "setting": f.cell.setting,
                "method": f.cell.method.name,
                "chosen": f.choice,
                "trials": f.tuned["trials"],
                "of": f.tuned["of"],
            }
            for f in found
            if f.tuned is not None
        ]
        path = self.folder / TUNING_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"tuning": plain(tuning) if tuning else None, "methods": rows}
        write_atomically(path, f"{json.dumps(content, indent=1)}\n".encode())
        return path

    def _chosen(self, cell: Cell) -> tuple[Mapping[str, Any] | None, Choice | None]:
        """The trials so far, and the choice once all are there. Where each of them diverged, it is
        the method as listed: its runs will say so."""
        search = cell.search
        if search is None:
            return None, {}
        records = self._trials(cell).records()
        seed = search.seeds[0]
        names = {cell.trial_name(choice): search.name(choice, seed) for choice in search.choices()}
        result = search.result({names[name]: record for name, record in records.items()})
        if len(result["trials"]) < result["of"]:
            return result, None
        diverged = all(trial["failed"] for trial in result["trials"])
        return result, {} if diverged else tune.best(result)

    def _trials(self, cell: Cell) -> Study:
        return Study(self.folder, cell.trials())

    def _study(self, cell: Cell, choice: Choice) -> Study:
        runs = cell.runs(choice)
        return Study(self.folder, {cell.run_name(seed): what for seed, what in runs.items()})

    def _left_out(self, cell: Cell) -> Study:
        """A record of a method that turned out not to fit."""
        listed = cell.experiment(self.design.seeds[0], {})
        return Study(self.folder, {cell.run_name("left-out"): listed})


def design(values: Mapping[str, Any]) -> Design:
    """Read what a study file says; raises ConfigError in one line."""
    known = [
        *OWN_KEYS,
        LINK,
        *(field.name for field in fields(Experiment) if field.name not in NOT_HERE),
    ]
    for key in values:
        if key in NOT_HERE:
            raise ConfigError(f"a study has '{NOT_HERE[key]}' instead", key)
        if key not in known:
            raise ConfigError(f"unknown key{did_you_mean(str(key), known)}", cut(str(key)))
    if "methods" not in values:
        raise ConfigError("a study needs 'methods': a list of algorithms, or all", "methods")
    shared = {key: value for key, value in values.items() if key not in OWN_KEYS}
    base = _experiment(shared)
    settings = _settings(shared, values.get("settings", {base.name: {}}))
    # Seeds are checked as those of a comparison are.
    seeds = Comparison(base, (base.algorithm,), values.get("seeds", (0,))).seeds
    tuning = _tuning(values.get("tuning"), seeds)
    methods = _methods(values["methods"], tuning)
    found = Design(base.name, base.about, methods, settings, seeds, tuning)
    _check(found)
    return found


def _experiment(values: Mapping[str, Any]) -> Experiment:
    """With local training, unless another algorithm is named."""
    experiment = parse({"algorithm": plain(reference_algorithm()), **values})
    assert isinstance(experiment, Experiment)
    return experiment


def _check(design: Design) -> None:
    """That every cell can be made, and no two have one folder."""
    names: dict[str, tuple[str, str]] = {}
    for cell in design.cells():
        cell.trials()
        who = (cell.setting, cell.method.name)
        other = names.setdefault(cell.run_name(0).casefold(), who)
        if other != who:
            raise ConfigError(
                f"{' '.join(other)} and {' '.join(who)} would have one folder: rename one of them"
            )


def _tuning(given: Any, seeds: Sequence[int]) -> Tuning | None:
    if given is None:
        return None
    try:
        tuning = from_mapping(Tuning, given)
    except ConfigError as error:
        raise error.inside("tuning") from None
    if tuning.seed in seeds:
        raise ConfigError(
            f"{tuning.seed} is among the study's seeds: results would be of the data that chose",
            "tuning.seed",
        )
    return tuning


# Settings.


def _settings(shared: Mapping[str, Any], given: Any) -> dict[str, Values]:
    if not isinstance(given, Mapping) or not given:
        raise ConfigError("expected names, each with the keys that it changes", "settings")
    found: dict[str, Values] = {}
    for name, changes in given.items():
        where = f"settings.{cut(str(name))}"
        _check_name(name, where)
        changes = {} if changes is None else changes
        if not isinstance(changes, Mapping):
            raise ConfigError(f"expected keys and values, got {shown(changes)}", where)
        for key in changes:
            root = str(key).partition(".")[0]
            if root in (*NOT_HERE, *OWN_KEYS, "name"):
                raise ConfigError("is the same in all settings", f"{where}.{cut(str(key))}")
        try:
            for more, values in _swept(shared, {str(key): changes[key] for key in changes}):
                found[" ".join([name, *more])] = values | {"name": folder_name(name)[:100]}
                if len(found) > MOST_SETTINGS:
                    raise ConfigError(f"more than {MOST_SETTINGS:,} settings")
        except ConfigError as error:
            raise error.inside(where) from None
    return found


def _swept(
    shared: Mapping[str, Any], changes: Mapping[str, Any]
) -> Iterator[tuple[list[str], Values]]:
    """The keys with the changes. Where a key has a list and does not take one, once for each of its
    values, with words for which."""
    values: Values = copy.deepcopy(dict(shared))
    for key, value in changes.items():
        set_key(values, key, copy.deepcopy(value), key)
    try:
        _experiment(values)
    except ConfigError as error:
        key = error.where
        swept = _value_at(values, key)
        if not isinstance(swept, list) or not swept or _value_at(shared, key) is swept:
            raise
        for value in swept:
            words = f"{key.rpartition('.')[2]}={value}"
            for more, found in _swept(shared, {**changes, key: value}):
                yield [words, *more], found
    else:
        yield [], values


def _value_at(values: Any, key: str) -> Any:
    for level in key.split("."):
        values = values.get(level) if isinstance(values, Mapping) else None
    return values


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not name.strip() or "," in name or not name.isprintable():
        raise ConfigError(f"{shown(name)} is no name: use words without a comma", where)


# Methods.


def _methods(given: Any, tuning: Tuning | None) -> tuple[Method, ...]:
    listed = [given] if given == ALL else given
    if not isinstance(listed, list) or not listed:
        raise ConfigError("expected a list of algorithms, or all", "methods")
    named: list[Method | None] = []
    for number, item in enumerate(listed):
        try:
            named.append(None if item == ALL else _method(item, tuning))
        except ConfigError as error:
            raise error.inside(f"methods[{number}]") from None
    by_name = [method for method in named if method is not None]
    taken = {method.algorithm.registered_name for method in by_name}
    untaken = [name for name in algorithms.built_in() if name not in taken]
    rest = [_method(name, tuning, of_all=True) for name in untaken]
    found = [m for method in named for m in (rest if method is None else [method])]
    names = [method.name for method in found]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"'{name}' is there twice: give each a label of its own", "methods")
    return tuple(found)


def _method(item: Any, tuning: Tuning | None, of_all: bool = False) -> Method:
    spec = dict(item) if isinstance(item, Mapping) else item
    grid, label = (spec.pop(k, None) if isinstance(spec, dict) else None for k in ("grid", "label"))
    algorithm = algorithms.build(spec)
    if label is not None:
        _check_name(label, "label")
    if grid is not None and tuning is None:
        raise ConfigError("needs 'tuning': how many trials, say {trials: 4}", "grid")
    shared = tuning.grid if tuning else None
    values = {key: kept for key, kept in _grid(shared, "tuning.grid") if _has(algorithm, key)}
    values = {key: kept for key in values if (kept := _accepted(algorithm, key, values[key]))}
    for key, choices in _grid(grid, "grid"):
        if not _has(algorithm, key):
            options = [field.name for field in fields(algorithm)]
            hint = did_you_mean(key.rpartition(".")[2], options)
            raise ConfigError(f"is no option of '{algorithm.registered_name}'{hint}", "grid")
        values[key] = choices
    return Method(label or algorithm.registered_name, algorithm, values, of_all)


def _grid(given: Any, where: str) -> Iterator[tuple[str, list[Any]]]:
    """By dotted key of an experiment: an option of the method, or a key of its training. Other keys
    would change the data, or how long it trains."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError("expected keys, each with the values to try", where)
    for key, choices in given.items():
        if "." in str(key) and not str(key).startswith("training."):
            raise ConfigError("only options of methods and of training are tuned", f"{where}.{key}")
        if not isinstance(choices, list) or not choices:
            raise ConfigError("expected a list of the values to try", f"{where}.{key}")
        yield str(key) if "." in str(key) else f"algorithm.{key}", choices


def _has(algorithm: Algorithm, key: str) -> bool:
    section, _, name = key.partition(".")
    return section != "algorithm" or name in {field.name for field in fields(algorithm)}


def _accepted(algorithm: Algorithm, key: str, choices: Sequence[Any]) -> list[Any]:
    """Of values for all methods, those that this one takes."""
    section, _, name = key.partition(".")
    if section != "algorithm":
        return list(choices)
    kept = []
    for value in choices:
        try:
            algorithms.build(plain(algorithm) | {name: value})
        except ConfigError:
            continue
        kept.append(value)
    return kept
