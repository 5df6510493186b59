"""Checkpoints: the state after a whole round, cheap to write and safe to interrupt.

A client is written again only when it has changed, under a new file name; then a manifest naming
the file and checksum of each is replaced atomically; then files that no manifest names are
removed. Whenever the process dies, the manifest on disk describes a complete state.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
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
    """The newest checkpoint of a run."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._folder = directory.path / "checkpoint"
        self._files: dict[str, dict[str, Any]] = {}

    def save(
        self, progress: Progress, records: Mapping[int, ClientRecord], changed: set[int]
    ) -> None:
        self._folder.mkdir(exist_ok=True)
        suffix = f"{progress.next_round:06d}.safetensors"
        trees = self._trees(progress, records, changed)
        self._files |= in_threads(lambda named: self._write(*named, suffix), trees)
        self._directory.sync_logs()  # a manifest must not promise lines that a power cut can take
        manifest = {
            "next_round": progress.next_round,
            "opened": progress.opened,
            "traffic": vars(progress.traffic),
            "trained": progress.trained,
            "log_sizes": progress.log_sizes,
            "files": self._files,
        }
        self._directory.write_json("checkpoint/manifest.json", manifest)
        named = {entry["file"] for entry in self._files.values()} | {"manifest.json"}
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
