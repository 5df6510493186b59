"""Checkpoints: the state after a whole round, cheap to write and safe to interrupt.

A client is written again only when it has changed, under a new file name; then a manifest naming
the file and checksum of each is replaced atomically; then files that no manifest names are
removed. Whenever the process dies, the manifest on disk describes a complete state.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from perfed.core import tensorfile
from perfed.core.channel import Traffic
from perfed.core.errors import RunError, shown
from perfed.core.threads import in_threads
from perfed.core.tree import Tree, flatten, unflatten
from perfed.engines import ClientRecord
from perfed.runs.checksums import MALFORMED
from perfed.runs.directory import MANIFEST, RunDirectory


@dataclass
class Progress:
    """Where a simulation stands between two rounds."""

    next_round: int = 0
    opened: bool = False
    """Whether the server has its first state."""
    state: Tree = field(default_factory=dict)
    link: Tree = field(default_factory=dict)
    """What the server's end of the wire keeps, by client; and of all clients together."""
    traffic: Traffic = field(default_factory=Traffic)
    trained: dict[int, int] = field(default_factory=dict)
    """In how many rounds each client has trained; those that have not are not here."""
    clients: int = 0
    """How many there are."""
    log_sizes: dict[str, int] = field(default_factory=dict)
    log_sums: dict[str, str] = field(default_factory=dict)
    """The checksums of the logs; empty for a checkpoint of an earlier version."""


class Checkpoints:
    """The newest checkpoint of a run, and earlier states of the server where they are wanted."""

    def __init__(
        self,
        directory: RunDirectory,
        wanted: Callable[[list[int]], Collection[int]] = lambda rounds: (),
    ) -> None:
        """``wanted``: of the rounds after which there is a state, those whose state is kept."""
        self._directory = directory
        self._wanted = wanted
        self._states: dict[str, dict[str, Any]] = {}  # by round, as in a JSON file
        self._folder = directory.path / "checkpoint"
        self._files: dict[str, dict[str, Any]] = {}

    def save(
        self, progress: Progress, records: Mapping[int, ClientRecord], changed: set[int]
    ) -> None:
        self._folder.mkdir(exist_ok=True)
        suffix = f"{progress.next_round:06d}.safetensors"
        trees = self._trees(progress, records, changed)
        self._files |= in_threads(lambda named: self._write(*named, suffix), trees)
        self._states[str(progress.next_round - 1)] = self._files["server"]
        wanted = self._wanted(sorted(map(int, self._states)))
        self._states = {n: entry for n, entry in self._states.items() if int(n) in wanted}
        self._directory.sync_logs()  # a manifest must not promise lines that a power cut can take
        manifest = {
            "next_round": progress.next_round,
            "opened": progress.opened,
            "traffic": vars(progress.traffic),
            "trained": {str(client): count for client, count in progress.trained.items()},
            "clients": progress.clients,
            "log_sizes": progress.log_sizes,
            "log_sums": progress.log_sums,
            "files": self._files,
            "states": self._states,
        }
        self._directory.write_json(MANIFEST, manifest)
        self._directory.note_checkpoint()
        entries = (*self._files.values(), *self._states.values())
        named = {entry["file"] for entry in entries} | {"manifest.json"}
        for path in self._folder.iterdir():
            if path.name not in named:
                path.unlink()

    def load(self, device: torch.device) -> tuple[Progress, dict[int, ClientRecord]] | None:
        """The newest checkpoint, on ``device``; None where the run has none yet."""
        if not (self._folder / "manifest.json").is_file():
            if self._directory.had_checkpoint():  # to begin again would cost all that was done
                raise RunError(f"{self._directory.path} has lost its {MANIFEST}")
            return None
        manifest = self._directory.read_json(MANIFEST)
        try:
            progress = _progress(manifest)
            self._files = {name: _entry(entry) for name, entry in manifest["files"].items()}
            self._states = {n: _entry(entry) for n, entry in manifest.get("states", {}).items()}
            trees = {name: self._read(entry, device) for name, entry in self._files.items()}
            progress.state = trees.pop("server")
            progress.link = trees.pop("link", {})  # a run without stages has none
            records = {
                int(name.removeprefix("client-")): ClientRecord.from_tree(tree)
                for name, tree in trees.items()
            }
        except MALFORMED as error:
            path, reason = self._directory.path / MANIFEST, f"{type(error).__name__}: {error}"
            raise RunError(f"{path} is corrupt: {reason}") from None
        return progress, records

    def roll_back(self, round: int, rounds: int, failure: str) -> int:
        """The server's state becomes the one after ``round``; all else stays as it is. Where the
        next round has failed, it is passed over, and its line says so. Returns the round that is
        next then, of ``rounds``."""
        saved = self.load(torch.device("cpu"))
        if saved is None or str(round) not in self._states:
            kept = ", ".join(self._states) or "none"
            raise RunError(f"there is no state after round {round}: kept are those after {kept}")
        progress, entry = saved[0], self._states[str(round)]
        self._read(entry, torch.device("cpu"))  # whole, or nothing is changed
        following = progress.next_round + (1 if failure else 0)
        if following >= rounds:
            raise RunError(f"{self._directory.path}: there is no round left to go on with")
        self._directory.cut_logs(progress.log_sizes, progress.log_sums)
        if failure:
            total = vars(progress.traffic)
            traffic = {"traffic": dict.fromkeys(total, 0), "traffic_total": total}
            line = {"round": progress.next_round, "clients": [], "failed": failure, **traffic}
            self._directory.append("rounds.jsonl", line)
        manifest = self._directory.read_json(MANIFEST)
        manifest["files"]["server"] = entry
        logs = {"log_sizes": self._directory.log_sizes(), "log_sums": self._directory.log_sums()}
        self._directory.write_json(MANIFEST, manifest | {"next_round": following} | logs)
        return following

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _trees(
        self, progress: Progress, records: Mapping[int, ClientRecord], changed: set[int]
    ) -> Iterator[tuple[str, Tree]]:
        yield "server", progress.state
        if progress.link:
            yield "link", progress.link
        for client in sorted(changed):
            yield f"client-{client}", records[client].tree()

    def _write(self, name: str, tree: Tree, suffix: str) -> tuple[str, dict[str, Any]]:
        file = f"{name}-{suffix}"
        checksum = tensorfile.save(self._folder / file, flatten(tree))
        return name, {"file": file, "checksum": checksum}

    def _read(self, entry: Mapping[str, Any], device: torch.device) -> Tree:
        path: Path = self._folder / entry["file"]
        tensors = tensorfile.load(path, entry["checksum"])
        return unflatten({name: tensor.to(device) for name, tensor in tensors.items()})


def _progress(manifest: Mapping[str, Any]) -> Progress:
    """What a manifest says itself; one of :data:`MALFORMED` where it is none."""
    traffic = {name: _count(value) for name, value in manifest["traffic"].items()}
    sums = manifest.get("log_sums", {})
    if not all(isinstance(value, str) for value in sums.values()):
        raise ValueError("'log_sums' are not texts")
    clients = _count(manifest.get("clients", len(manifest["trained"])))
    return Progress(
        next_round=_count(manifest["next_round"]),
        opened=bool(manifest.get("opened", True)),
        traffic=Traffic(**traffic),
        trained=_trained(manifest["trained"], clients),
        clients=clients,
        log_sizes={name: _count(value) for name, value in manifest["log_sizes"].items()},
        log_sums=dict(sums),
    )


def _trained(recorded: Any, clients: int) -> dict[int, int]:
    """Earlier versions wrote a list, with a number for every client."""
    if isinstance(recorded, list):
        recorded = dict(zip(range(clients), recorded, strict=True))
    trained = {int(client): _count(count) for client, count in recorded.items() if count != 0}
    if not all(0 <= client < clients for client in trained):
        raise ValueError(f"'trained' has other clients than 0 … {clients - 1}")
    return trained


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The file of one tree: in the checkpoint's own folder, with a checksum."""
    file = entry["file"]
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"{shown(file)} is not the name of a file")
    return {"file": file, "checksum": _count(entry["checksum"])}


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{shown(value)} is not a count")
    return value
