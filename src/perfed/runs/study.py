"""Many runs that answer one question: resumable, divisible into shards, small to carry home.

    runs/NAME/           each run's directory, without models
    records/NAME.json    what is kept of a finished run: numbers, clients, configuration, machine

A record is all that tables and figures are made from. A study cut in shards, run on several
machines or in several allocations, is put together by copying the records into one folder.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perfed.config import Experiment, parse
from perfed.core.errors import ConfigError, RunError
from perfed.core.tensorfile import write_atomically
from perfed.engines import Execution
from perfed.runs.checksums import parsed
from perfed.runs.comparison import run_together
from perfed.runs.coordinator import Callback
from perfed.runs.directory import RunDirectory
from perfed.runs.result import Result, kinds_of_clients
from perfed.runs.simulation import AUTOMATIC, as_recorded

Record = dict[str, Any]
Gains = list[tuple[float, int, int]]
"""Of every client: points above its own local model, training samples, labels among them."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """Every ``of``-th piece of a study, beginning with the ``number``-th."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise ConfigError(f"'{text}' is not a shard: 1/4, 2/4, 3/4 or 4/4, say", "--shard")
        return cls(int(number), int(of))


def folder_name(text: str) -> str:
    """A run's name as a folder's on any system."""
    return "".join(c if c.isalnum() or c in "-=." else "_" for c in text)


class Study:
    """Experiments by name, in the order in which they are wanted."""

    def __init__(self, folder: str | Path, experiments: Mapping[str, Experiment]) -> None:
        self.folder = Path(folder)
        self.experiments = dict(experiments)

    def run(
        self,
        how: Execution = AUTOMATIC,
        callbacks: Sequence[Callback] = (),
        shard: Shard | None = None,
        seconds: float = float("inf"),
        side_by_side: bool = False,
    ) -> None:
        """Run what has no record yet; after ``seconds``, nothing more is begun.

        ``side_by_side`` runs experiments that differ only in their seed as one stack.
        """
        shard = shard or Shard()
        began = time.monotonic()
        self.records()  # what was made with other settings is found before anything is run
        with how.several_runs():
            for names in self._pieces(side_by_side)[shard.number - 1 :: shard.of]:
                missing = [name for name in names if not self._record_path(name).is_file()]
                if time.monotonic() - began >= seconds:
                    return
                if missing:
                    self._run(missing, how, callbacks)

    def records(self) -> dict[str, Record]:
        """Those there are so far, by name, in the study's order."""
        found = {}
        for name, experiment in self.experiments.items():
            path = self._record_path(name)
            if not path.is_file():
                continue
            record = read_record(path)
            if parse(record["config"]) != experiment:  # options it did not know have their defaults
                raise RunError(f"{path} was made with other settings: choose another folder")
            found[name] = record
        return found

    def leave_out(self, reason: str) -> None:
        """Of all that has no record yet, record why it is not run."""
        for name in self.missing():
            config = self.experiments[name].to_mapping()
            self._write_record(name, {"config": config, "environment": {}, "left_out": reason})

    def missing(self) -> list[str]:
        return [name for name in self.experiments if not self._record_path(name).is_file()]

    def _pieces(self, side_by_side: bool) -> list[list[str]]:
        pieces: dict[Any, list[str]] = {}
        for name, experiment in self.experiments.items():
            alike = dataclasses.replace(experiment, seed=0) if side_by_side else name
            pieces.setdefault(alike, []).append(name)
        return list(pieces.values())

    def _run(self, names: list[str], how: Execution, callbacks: Sequence[Callback]) -> None:
        folders = {self.folder / "runs" / name: name for name in names}
        how = dataclasses.replace(how, save_models=False)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            how = as_recorded(RunDirectory(folder), how)
        unfinished = {
            folder: self.experiments[name]
            for folder, name in folders.items()
            if not (folder / "summary.json").is_file()
        }
        run_together(unfinished, callbacks, how)
        for folder, name in folders.items():
            self._write_record(name, record_of(folder))

    def _record_path(self, name: str) -> Path:
        return self.folder / "records" / f"{name}.json"

    def _write_record(self, name: str, record: Record) -> None:
        path = self._record_path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, separators=(",", ":"), allow_nan=False)
        write_atomically(path, f"{text}\n".encode())


def read_record(path: Path) -> Record:
    try:
        record: Record = parsed(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path} is corrupt: {error}") from None
    if "config" not in record:
        raise RunError(f"{path} is not a study's record")
    return record


def record_of(folder: Path) -> Record:
    """What is kept of a run, finished, failed or pruned."""
    directory, result = RunDirectory(folder), Result(folder)
    kept: Record = {
        "config": result.experiment.to_mapping(),
        "environment": directory.read_json("environment.json"),
    }
    if directory.failure:
        return kept | {"failed": directory.failure}
    if not directory.finished:
        done = max(line["round"] for line in directory.lines("rounds.jsonl")) + 1
        return kept | {"pruned": done, "curve": _curve(directory)}
    timing = directory.lines("timing.jsonl")
    return kept | {
        "summary": result.summary,
        "opening": _opening_traffic(directory),
        "curve": _curve(directory),
        "clients": _clients(directory),
        "seconds": round(sum(sum(_phases(line)) for line in timing), 2),
    }


def machines(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Each kind of machine once, as it was when it was used last; the newest first."""
    found: dict[str, dict[str, Any]] = {}
    for environment in filter(None, (record["environment"] for record in records.values())):
        kind = json.dumps([environment[key] for key in ("device", "python", "packages")])
        found[kind] = max(environment, found.get(kind, environment), key=lambda e: e["started"])
    return sorted(found.values(), key=lambda environment: environment["started"], reverse=True)


def _phases(line: Mapping[str, Any]) -> Iterator[float]:
    return (value for name, value in line.items() if name != "round")


def _opening_traffic(directory: RunDirectory) -> dict[str, int]:
    """What crossed before the first round, where a method has an initial set S(−1)."""
    lines = [line for line in directory.lines("rounds.jsonl") if line["round"] < 0]
    return dict(lines[0]["traffic"]) if lines else {}


def _curve(directory: RunDirectory) -> dict[str, list[list[float]]]:
    """By model kind: round, mean test accuracy, mean validation accuracy."""
    curve: dict[str, list[list[float]]] = {}
    for line in directory.lines("rounds.jsonl"):
        for kind, numbers in line.get("evaluation", {}).items():
            row = [numbers["test_accuracy"], numbers["validation_accuracy"]]
            curve.setdefault(kind, []).append([line["round"], *(round(v, 5) for v in row)])
    return curve


def _clients(directory: RunDirectory) -> Record:
    """A number per client: how much it has, how often it trained, how well it ends."""
    partition = directory.read_json("partition.json")
    last = directory.lines("clients.jsonl")[-1]
    trained = Counter(
        client
        for line in directory.lines("rounds.jsonl")
        if line["round"] >= 0
        for client in line["clients"]
    )
    numbers = partition.get("numbers", range(len(partition["clients"])))
    return {
        "train_size": [len(client["train"]) for client in partition["clients"]],
        "test_size": [len(client["test"]) for client in partition["clients"]],
        "train_labels": [
            sum(count > 0 for count in client["labels"]["train"]) for client in partition["clients"]
        ],
        "architecture": [client["architecture"] for client in partition["clients"]],
        **kinds_of_clients(partition),
        "rounds_trained": [trained[client] for client in numbers],
        "test_accuracy": {
            kind: [round(value, 5) for value in last[kind]["test_accuracy"]]
            for kind in last
            if kind != "round"
        },
    }


def honest_accuracies(record: Record, kind: str) -> list[float]:
    """After the last round, of every client; where some are hostile, of the others."""
    clients = record["clients"]
    accuracies: list[float] = clients["test_accuracy"][kind]
    hostile = clients.get("hostile", [False] * len(accuracies))
    return [value for value, lies in zip(accuracies, hostile, strict=True) if not lies]


def client_gains(record: Record, local: Record, kind: str, local_kind: str = "personal") -> Gains:
    """Of honest clients."""
    clients = record["clients"]
    return [
        (100 * (accuracy - alone), size, labels)
        for accuracy, alone, size, labels, hostile in zip(
            clients["test_accuracy"][kind],
            local["clients"]["test_accuracy"][local_kind],
            clients["train_size"],
            clients["train_labels"],
            clients.get("hostile", [False] * len(clients["train_size"])),
            strict=True,
        )
        if not hostile
    ]
