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
from perfed.core.errors import RunError
from perfed.core.threads import in_threads
from perfed.core.tree import Tree, flatten, unflatten
from perfed.engines import ClientRecord
from perfed.runs.directory import RunDirectory


@dataclass
class Progress:
    """Where a simulation stands between two rounds."""

    next_round: int = 0
    opened: bool = False
    """Whether the server has its first state."""
    state: Tree = field(default_factory=dict)
    link: Tree = field(default_factory=dict)
    """What the server's end of the wire keeps, by client."""
    traffic: Traffic = field(default_factory=Traffic)
    trained: list[int] = field(default_factory=list)
    """In how many rounds each client has trained."""
    log_sizes: dict[str, int] = field(default_factory=dict)


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
            "trained": progress.trained,
            "log_sizes": progress.log_sizes,
            "files": self._files,
            "states": self._states,
        }
        self._directory.write_json("checkpoint/manifest.json", manifest)
        entries = (*self._files.values(), *self._states.values())
        named = {entry["file"] for entry in entries} | {"manifest.json"}
        for path in self._folder.iterdir():
            if path.name not in named:
                path.unlink()

    def load(self, device: torch.device) -> tuple[Progress, dict[int, ClientRecord]] | None:
        """The newest checkpoint, on ``device``; None where the run has none yet."""
        if not (self._folder / "manifest.json").is_file():
            return None
        manifest = self._directory.read_json("checkpoint/manifest.json")
        try:
            self._files = manifest["files"]
            self._states = manifest.get("states", {})
            trees = {name: self._read(entry, device) for name, entry in self._files.items()}
            progress = Progress(
                next_round=manifest["next_round"],
                opened=manifest.get("opened", True),
                state=trees.pop("server"),
                link=trees.pop("link", {}),  # a run without stages has none
                traffic=Traffic(**manifest["traffic"]),
                trained=manifest["trained"],
                log_sizes=manifest["log_sizes"],
            )
        except (KeyError, TypeError) as error:
            path = self._folder / "manifest.json"
            raise RunError(f"{path} is corrupt: it lacks {error}") from None
        records = {
            int(name.removeprefix("client-")): ClientRecord.from_tree(tree)
            for name, tree in trees.items()
        }
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
        self._directory.cut_logs(progress.log_sizes)
        if failure:
            total = vars(progress.traffic)
            traffic = {"traffic": dict.fromkeys(total, 0), "traffic_total": total}
            line = {"round": progress.next_round, "clients": [], "failed": failure, **traffic}
            self._directory.append("rounds.jsonl", line)
        manifest = self._directory.read_json("checkpoint/manifest.json")
        manifest["files"]["server"] = entry
        manifest |= {"next_round": following, "log_sizes": self._directory.log_sizes()}
        self._directory.write_json("checkpoint/manifest.json", manifest)
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
