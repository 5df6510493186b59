"""Runs as a report sees them: read from their directories, finished or still going on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from perfed.core.algorithm import Algorithm
from perfed.core.errors import RunError
from perfed.core.method_numbers import method_numbers
from perfed.runs.comparison import FILE as COMPARISON_FILE
from perfed.runs.comparison import read_comparison, run_name
from perfed.runs.directory import FAILED, FEDERATION, LOCK, RunDirectory
from perfed.runs.result import Result, headline_kind, part_size
from perfed.runs.settings import flat

IN_A_NAME = ("name", "about", "seed", "algorithm")  # do not set two runs of a method apart

LONGEST_NAME = 60  # runs that would have longer ones go by their folders

CLIENTS = (
    "clients",
    "evaluate_clients",
    "data",
    "partition",
    "shift",
    "split",
    "fresh_test",
    "shared_test",
    "fresh_mix",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One run directory."""

    result: Result
    label: str
    """The algorithm, and whatever else sets the run apart from the others here."""

    @property
    def seed(self) -> int:
        return self.result.experiment.seed

    @property
    def path(self) -> Path:
        return self.result.path

    @property
    def title(self) -> str:
        return f"{self.label}, seed {self.seed}"

    @cached_property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.path)

    @cached_property
    def setting(self) -> dict[str, Any]:
        return _setting(self.result)

    @property
    def clients_setting(self) -> dict[str, Any]:
        """What says who the clients are, what they have, and what they are evaluated on."""
        found = {key: self.setting[key] for key in CLIENTS}
        if not (found["fresh_test"] or found["shared_test"]):
            del found["fresh_mix"]  # nobody asked for it
        return found

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Of the rounds; the first may be that of the initial set S(−1)."""
        return self.directory.lines("rounds.jsonl")

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["round"] >= 0]

    @cached_property
    def client_numbers(self) -> dict[int, dict[str, Any]]:
        """Every client's numbers by model kind, after each evaluated round. A round counts when
        its own line is there too, which is written last."""
        known = {line["round"] for line in self.rounds}
        lines = self.directory.lines("clients.jsonl")
        return {line["round"]: line for line in lines if line["round"] in known}

    @cached_property
    def evaluated(self) -> dict[int, dict[str, Any]]:
        """The line of each evaluated round."""
        return {line["round"]: line for line in self.rounds if "evaluation" in line}

    @cached_property
    def partition(self) -> dict[str, Any]:
        """What is recorded of the data; nothing before it is divided."""
        expected = (self.path / "partition.json").is_file() or self.rounds
        return self.directory.read_json("partition.json") if expected else {}

    @property
    def clients(self) -> list[dict[str, Any] | None]:
        """What is recorded of each; None for a site that has not joined."""
        clients: list[dict[str, Any] | None] = self.partition.get("clients", [])
        return clients

    @cached_property
    def numbers(self) -> list[int]:
        """Of those in ``clients``: all, unless only some are evaluated."""
        return list(self.partition.get("numbers", range(len(self.clients))))

    @property
    def is_federation(self) -> bool:
        """Of sites, whose data is nobody else's; not a simulation."""
        return (self.path / FEDERATION).is_file()

    @property
    def knows_labels(self) -> bool:
        """Of every client; of the sites of a federation only the sites know."""
        return bool(self.clients) and all(client and "labels" in client for client in self.clients)

    @cached_property
    def classes_heard(self) -> dict[int, list[float]]:
        """By client: how much of each class its newest answer names, as the coordinator of a
        federation sees it; empty elsewhere."""
        newest: dict[int, list[float]] = {}
        for line in self.rounds:
            told = line.get("heard", {}).get("classes", {})
            newest |= {int(client): shares for client, shares in told.items()}
        return dict(sorted(newest.items()))

    @property
    def class_names(self) -> list[str]:
        """Of labels 0, 1, 2, …; empty where the data does not name them."""
        return list(self.partition.get("data", {}).get("classes", []))

    def client_name(self, position: int) -> str:
        """Of one of ``clients``: its number, and its name where the data names it."""
        names = self.partition.get("client_names", [])
        name = f"client {self.numbers[position]}"
        name = f"{name} ({names[position]})" if names else name
        hostile = self.partition.get("hostile")
        return f"{name}, hostile" if hostile and hostile[position] else name

    @cached_property
    def train_sizes(self) -> np.ndarray:
        return np.array([part_size(c, "train") if c else 0 for c in self.clients])

    @property
    def kinds(self) -> list[str]:
        last = list(self.evaluated.values())[-1:]
        return list(last[0]["evaluation"]) if last else []

    @property
    def failure(self) -> str:
        """Why it ended, where it did not end well."""
        return self.directory.failure

    @property
    def over(self) -> bool:
        """Nothing more will be written to it."""
        return self.directory.finished or bool(self.failure)

    @property
    def stopped(self) -> bool:
        """It has not ended, and nobody works on it."""
        going_on = self.directory.in_use()  # asked first: a run may end meanwhile
        return not going_on and not self.over

    @property
    def method(self) -> tuple[str, str]:
        """The algorithm and every setting: what runs that differ in their seed have in common."""
        return self.result.experiment.algorithm.label(), repr(self.setting)

    def accuracies(self, kind: str, round: int) -> np.ndarray:
        """Of every client; NaN where a site has not told."""
        numbers = np.array(self.client_numbers[round][kind]["test_accuracy"], dtype=float)
        return np.where(self.partition.get("hostile", False), np.nan, numbers)

    def cost(self, round: int, what: str) -> int:
        """``parameters`` or ``bytes`` sent up to the end of a round."""
        total = self.evaluated[round]["traffic_total"]
        return int(total[f"up_{what}"] + total[f"down_{what}"])

    def summary(self) -> dict[str, Any]:
        return self.result.summary | {"algorithm": self.label}


@dataclasses.dataclass(frozen=True)
class Series:
    """One curve: a method's model of one kind, over its seeds."""

    label: str
    kind: str
    runs: tuple[Run, ...]
    number: int
    """Of the method: which colour and style it has, in every chart."""
    second: bool = False
    """Whether it is another model than the one a client would use."""

    @property
    def algorithm(self) -> Algorithm:
        return self.runs[0].result.experiment.algorithm

    @property
    def over(self) -> bool:
        return all(run.over for run in self.runs)

    @property
    def seeds(self) -> set[int]:
        return {run.seed for run in self.runs}

    @property
    def rounds(self) -> list[int]:
        """Those that any seed has got to."""
        return sorted({round for run in self.runs for round in run.evaluated})

    def means(self, round: int) -> np.ndarray:
        """The mean test accuracy of each seed that has got there."""
        return np.array(
            [
                run.evaluated[round]["evaluation"][self.kind]["test_accuracy"]
                for run in self.runs
                if round in run.evaluated
            ]
        )

    def mean(self, round: int) -> float:
        return float(self.means(round).mean())

    def last(self) -> float:
        """The mean over seeds of the last accuracy of each."""
        return float(np.mean([self.means_of(run)[-1] for run in self.runs]))

    def worst_tenth(self) -> float:
        """Of the clients, after the last evaluation: the mean over seeds."""
        name = "test_accuracy_worst_decile"
        ends = [list(run.evaluated.values())[-1]["evaluation"][self.kind] for run in self.runs]
        return float(np.mean([end[name] for end in ends]))

    def means_of(self, run: Run) -> list[float]:
        kind = self.kind
        return [line["evaluation"][kind]["test_accuracy"] for line in run.evaluated.values()]

    def cost(self, round: int, what: str = "parameters") -> float:
        return float(np.mean([r.cost(round, what) for r in self.runs if round in r.evaluated]))

    def pooled(self, round: int) -> np.ndarray:
        """All clients' accuracies of all seeds."""
        values = [r.accuracies(self.kind, round) for r in self.runs if round in r.client_numbers]
        every = np.concatenate(values)
        kept: np.ndarray = every[~np.isnan(every)]
        return kept


def read(paths: Sequence[Path]) -> list[Run]:
    """The runs of run directories and comparisons, those that have begun; each once."""
    paths = list({path.resolve(): path for path in paths}.values())
    found = [
        (Result(folder), name)
        for path, name in zip(paths, _distinct_names(paths), strict=True)
        for folder in _folders(path)
    ]
    results, names = [result for result, _ in found], [name for _, name in found]
    return [
        Run(result, label) for result, label in zip(results, _labels(results, names), strict=True)
    ]


@contextmanager
def reading(paths: Sequence[Path]) -> Iterator[None]:
    """Around all that is made from the files of these runs: see :meth:`RunDirectory.reading`."""
    with ExitStack() as stack:
        for folder in (folder for path in paths for folder in _folders(path)):
            if not RunDirectory(folder).has_checksums:
                stack.enter_context(RunDirectory(folder).reading())
        yield


def _distinct_names(paths: Sequence[Path]) -> list[str]:
    """Of folders, as short as they can be."""
    names = [path.resolve().name for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _folders(path: Path) -> list[Path]:
    if (path / COMPARISON_FILE).is_file():
        names = [run_name(experiment) for experiment in read_comparison(path).experiments()]
        return [path / name for name in names if (path / name / "config.yaml").is_file()]
    if not (path / "config.yaml").is_file():
        raise RunError(f"{path} is neither a run directory nor a comparison")
    return [path]


def written(paths: Sequence[Path]) -> dict[str, int]:
    """How much each run has written so far, and whether it goes on; changes when there is
    something new to show."""
    sizes: dict[str, int] = {}
    for folder in (folder for path in paths for folder in _folders(path)):
        ended = [name for name in ("summary.json", FAILED) if (folder / name).is_file()]
        sizes |= {
            f"{folder}/{name}": size for name, size in RunDirectory(folder).log_sizes().items()
        }
        sizes |= {f"{folder}/{name}": 1 for name in ended}
        sizes[f"{folder}/{LOCK}"] = RunDirectory(folder).in_use()
    return sizes


def planned(paths: Sequence[Path]) -> int:
    """How many runs there will be."""
    return sum(
        len(read_comparison(path).experiments()) if (path / COMPARISON_FILE).is_file() else 1
        for path in paths
    )


def _labels(results: Sequence[Result], folders: Sequence[str]) -> list[str]:
    """Algorithms, with the other settings in which runs differ; or with the folder that was named,
    where settings tell no run from another, or would be too long to read. The seeds of a method in
    one folder have one label."""
    settings = [flat(_setting(result)) for result in results]
    names = dict.fromkeys(key for setting in settings for key in setting)
    differ = [n for n in names if len({repr(setting.get(n)) for setting in settings}) > 1]
    methods = [result.experiment.algorithm.label() for result in results]
    by_folder = [f"{method} · {name}" for method, name in zip(methods, folders, strict=True)]
    labels = [
        " · ".join([method, *(f"{n}={s[n]}" for n in differ if n in s)])
        for method, s in zip(methods, settings, strict=True)
    ]
    if max(map(len, labels), default=0) > LONGEST_NAME and len(set(folders)) > 1:
        return by_folder
    seeds = [r.experiment.seed for r in results]
    times = Counter(zip(labels, seeds, strict=True))
    ambiguous = {
        (label, folder)
        for label, seed, folder in zip(labels, seeds, folders, strict=True)
        if times[label, seed] > 1
    }
    return [
        named if (label, folder) in ambiguous else label
        for label, folder, named in zip(labels, folders, by_folder, strict=True)
    ]


def _setting(result: Result) -> dict[str, Any]:
    """Everything but the method."""
    mapping = result.experiment.to_mapping()
    return {key: value for key, value in mapping.items() if key not in IN_A_NAME}


def series(runs: Sequence[Run]) -> list[Series]:
    """A curve for each label and model kind, of the runs that have an evaluated round."""
    grouped: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        for kind in run.kinds:
            grouped.setdefault((run.label, kind), []).append(run)
    numbers = method_numbers([label for label, _ in grouped])
    return [
        Series(
            f"{label}, {kind}" if len(group[0].kinds) > 1 else label,
            kind,
            tuple(group),
            numbers[label],
            kind != headline_kind(group[0].kinds),
        )
        for (label, kind), group in grouped.items()
    ]


def same_data(curves: Sequence[Series]) -> bool:
    """Whether all are of the same clients with the same seeds. Only then one is the highest."""
    return (
        len({frozenset(curve.seeds) for curve in curves}) == 1
        and len({repr(curve.runs[0].clients_setting) for curve in curves}) == 1
    )


def alone(curve: Series, curves: Sequence[Series]) -> Series | None:
    """Local training of the same clients; of several, that with the most settings in common, and
    then that which trains the same clients at the same times, as in the tables."""
    own = curve.runs[0]

    def differences(other: Series) -> tuple[int, bool]:
        run = other.runs[0]
        settings = sum(own.setting[key] != value for key, value in run.setting.items())
        return settings, run.result.experiment.algorithm.trains_everyone()

    local = [c for c in curves if c.algorithm.reference]
    alike = [c for c in local if c.runs[0].clients_setting == own.clients_setting]
    return min(alike, key=differences, default=None)


def clients_word(runs: Iterable[Run]) -> str:
    """Whose means are shown."""
    lied = any(run.result.experiment.hostile is not None for run in runs)
    return "honest clients" if lied else "clients"


def first_of_each(runs: Sequence[Run]) -> list[Run]:
    """One run of each label: that of the lowest seed."""
    chosen: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        chosen.setdefault(run.label, run)
    return [run for run in runs if run is chosen[run.label]]
