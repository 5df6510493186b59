"""A run directory: everything a number needs to be trusted, and to be made again.

    config.yaml      the resolved configuration
    environment.json versions, machine, device
    partition.json   every client's samples (original numbers), architecture, and the public set;
                     of networks how large they are, of a user's own data a hash;
                     of the sites of a federation, how many samples they have
    rounds.jsonl     a line per round: who took part, what clients and server note, traffic,
                     summaries
    clients.jsonl    a line per evaluation: every client's numbers
    timing.jsonl     a line per round: seconds by phase
    checkpoint/      the newest complete state, while the run is going on
    models/          the final models, safetensors
    summary.json     the end of a finished run
    failed.json      instead of it, why a run has diverged
    report.html      what there is to see of it, made from the rest

Lines are only ever appended, so a run can be read while it goes on. A resume cuts the files back to
where they were at the checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from perfed.config import dump_yaml
from perfed.core.errors import RunError
from perfed.core.tensorfile import write_atomically
from perfed.engines.store import PREFIX as STORE_PREFIX

LOCK = ".lock"
FAILED = "failed.json"
FEDERATION = "federation.json"  # there where clients are sites, and keep their models
LOGS = ("rounds.jsonl", "clients.jsonl", "timing.jsonl")


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        make_directory(path)
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        if not (path / "config.yaml").is_file():
            raise RunError(f"{path} is not a run directory: it has no config.yaml")
        return cls(path)

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").is_file()

    @property
    def failure(self) -> str:
        """Why it ended without a result; empty where it did not."""
        if self.finished or not (self.path / FAILED).is_file():
            return ""
        return str(self.read_json(FAILED)["error"])

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time; the lock goes with the process, however it ends."""
        with open(self.path / LOCK, "w") as file:
            for patience in (0.05, 0.2, None):  # a report that looks has it for a moment
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if patience is None:
                        raise RunError(f"{self.path} is in use by another process") from None
                    time.sleep(patience)
            yield

    def in_use(self) -> bool:
        """Whether a process works on it."""
        if not (self.path / LOCK).is_file():
            return False
        with open(self.path / LOCK) as file:
            try:  # shared, so that two that look do not take each other for a run
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def write_json(self, name: str, values: Any) -> None:
        write_atomically(
            self.path / name, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode()
        )

    def write_yaml(self, name: str, values: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, dump_yaml(values).encode())

    def read_json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text("utf-8"))
        except FileNotFoundError:
            raise RunError(f"{self.path} has no {name}") from None
        except ValueError as error:
            raise RunError(f"{self.path / name} is corrupt: {error}") from None

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        with open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All whole lines; the last one may be in the making."""
        path = self.path / name
        if not path.is_file():
            return []
        whole, _, _ = path.read_text("utf-8").rpartition("\n")
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise RunError(f"{path} is corrupt: {error}") from None

    def log_sizes(self) -> dict[str, int]:
        return {
            name: os.path.getsize(self.path / name) for name in LOGS if (self.path / name).is_file()
        }

    def sync_logs(self) -> None:
        for name in self.log_sizes():
            with open(self.path / name, "rb") as file:
                os.fsync(file.fileno())

    def remove_leftovers(self) -> None:
        """What a killed process could not tidy up itself."""
        for folder in self.path.glob(f"{STORE_PREFIX}*"):
            shutil.rmtree(folder)

    def cut_logs(self, sizes: Mapping[str, int]) -> None:
        """Forget what was written after a checkpoint (or at all, without one)."""
        for name in LOGS:
            path, size = self.path / name, sizes.get(name, 0)
            if not path.is_file() and not size:
                continue
            if not path.is_file() or os.path.getsize(path) < size:
                raise RunError(f"{path} is shorter than at the checkpoint: lines are missing")
            os.truncate(path, size)


def make_directory(path: Path) -> None:
    """A new directory; never one that has something in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(entry.name != LOCK for entry in path.iterdir()):
            raise RunError(
                f"{path} exists already: choose another, or continue it with --resume {path}"
            )
    except OSError as error:
        raise RunError(f"cannot create {path}: {error.strerror}") from None


def claimed_path(name: str, root: Path = Path("runs")) -> Path:
    """``runs/<name>-<time>``, numbered where several runs start in one second. It is made here,
    still empty: whoever makes it has it, and of two processes only one can."""
    base = root / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = base if number == 1 else base.with_name(f"{base.name}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    except OSError as error:
        raise RunError(f"cannot create {base}: {error.strerror}") from None
    return path


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine."""
    packages = {}
    for name in ("perfed", "torch", "numpy", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "python": sys.version.split()[0],
        "packages": packages,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": f"{device.type}: {name}",
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
