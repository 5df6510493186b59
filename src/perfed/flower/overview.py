"""What a run of a federation looks like from outside, from its files alone: also while the process
that works on it is dead."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from perfed.core.errors import RunError
from perfed.core.layout import Table
from perfed.flower.coordinator import PRESENCE
from perfed.flower.numbers import numbers_in
from perfed.runs.directory import FEDERATION, RunDirectory
from perfed.runs.result import Result, headline

AT_WORK, FINISHED, FAILED, DEAD = "at work", "finished", "failed", "dead"


@dataclass
class SiteState:
    """One client, as the coordinator knows it."""

    client: int
    architecture: str = ""
    samples: int = 0
    seen: float | None = None
    """When it was last connected, in seconds since 1970."""
    rounds: int = 0
    """In how many its answer was admitted."""
    refused: int = 0
    absent: str = ""
    """Why it took no part in the newest round."""
    accuracy: float | None = None


@dataclass
class RunState:
    """A run of a federation."""

    run: str
    state: str
    failure: str
    rounds_done: int
    rounds: int
    newest: float
    """When its newest round ended, or it began, in seconds since 1970."""
    bytes: int = 0
    accuracy: float | None = None
    epsilon: float | None = None
    """What has been spent, where the run protects anything by noise and says so."""
    suspect: list[str] = field(default_factory=list)
    kept_out: dict[str, str] = field(default_factory=dict)
    """Who may not join, and why."""
    sites: list[SiteState] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return self.state in (AT_WORK, FINISHED)

    def to_mapping(self) -> dict[str, Any]:
        return asdict(self) | {"well": self.well}


def federation(path: Path) -> RunDirectory:
    if not (path / "config.yaml").is_file():
        raise RunError(
            f"no run has begun in {path}: in the coordinator's folder, 'perfed federation start' "
            "begins it; another run's folder follows the command as an argument"
        )
    directory = RunDirectory.open(path)
    if not (path / FEDERATION).is_file():
        raise RunError(f"{path} is not the run of a federation: it has no {FEDERATION}")
    return directory


def look(path: Path) -> RunState:
    """As its files say it now."""
    directory = federation(path)
    result = Result(path)
    lines = directory.lines("rounds.jsonl")
    newest = path / ("rounds.jsonl" if lines else "config.yaml")
    made = RunState(
        result.experiment.name,
        _state(directory),
        directory.failure,
        sum(line["round"] >= 0 for line in lines),
        result.experiment.rounds,
        newest.stat().st_mtime,
        sites=[SiteState(client) for client in range(result.experiment.clients)],
    )
    for line in lines:
        for client in line["clients"]:
            made.sites[client].rounds += line["round"] >= 0
        for client in line.get("refused", {}):
            made.sites[int(client)].refused += 1
        if line.get("evaluation"):
            made.accuracy = headline(line["evaluation"])["test_accuracy"]
    if lines:
        last = lines[-1]
        made.suspect = list(last.get("suspect", ()))
        total = last.get("traffic_total", {})
        made.bytes = total.get("up_bytes", 0) + total.get("down_bytes", 0)
        if isinstance(last.get("epsilon"), float | int):
            made.epsilon = float(last["epsilon"])
        for client, why in last.get("absent", {}).items():
            made.sites[int(client)].absent = why
    _add_members(made, directory)
    return made


def _state(directory: RunDirectory) -> str:
    """The process that works on a run holds a lock, which goes with it however it ends."""
    if directory.finished:
        return FINISHED
    if directory.failure:
        return FAILED
    return AT_WORK if directory.in_use() else DEAD


def _add_members(made: RunState, directory: RunDirectory) -> None:
    if (directory.path / "partition.json").is_file():
        members = directory.read_json("partition.json")["clients"]
        for site, member in zip(made.sites, members, strict=True):
            if member is not None:
                site.architecture = member["architecture"]
                site.samples = member["sizes"]["train"]
    if (directory.path / PRESENCE).is_file():
        presence = directory.read_json(PRESENCE)
        made.kept_out = presence["kept_out"]
        for client, seen in presence["seen"].items():
            made.sites[int(client)].seen = seen
    for line in directory.lines("clients.jsonl")[-1:]:
        for client, numbers in numbers_in(line, len(made.sites)).items():
            made.sites[client].accuracy = headline(numbers)["test_accuracy"]


def table(made: RunState) -> str:
    now = time.time()
    rows = [
        [
            str(site.client),
            site.architecture or "never came",
            "" if site.seen is None else f"{max(0.0, now - site.seen):.0f} s ago",
            str(site.rounds),
            str(site.refused),
            "" if site.accuracy is None else f"{100 * site.accuracy:.1f} %",
            site.absent,
        ]
        for site in made.sites
    ]
    header = ["client", "network", "seen", "rounds", "refused", "accuracy", "took no part because"]
    return Table("", header, rows, names=2).text()
