"""A run directory: everything a number needs to be trusted, and to be made again.

    config.yaml      the resolved configuration
    environment.json versions, machine, device
    partition.json   every client's samples (original numbers), architecture, and the public set;
                     of networks how large they are, of a user's own data a hash;
                     of the sites of a federation, how many samples they have;
                     where only some clients are evaluated, these alone, and their numbers
    rounds.jsonl     a line per round: who took part, what clients and server note, traffic,
                     summaries
    clients.jsonl    a line per evaluation: every client's numbers
    timing.jsonl     a line per round: seconds by phase
    checksums.json   the settings as the run began; at its end the checksums of the logs
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
from perfed.core import locks
from perfed.core.errors import RunError
from perfed.core.notices import say_once
from perfed.core.tensorfile import write_atomically
from perfed.engines.store import PREFIX as STORE_PREFIX
from perfed.runs import checksums
from perfed.runs.checksums import LogSum

LOCK = ".lock"
FAILED = "failed.json"
FEDERATION = "federation.json"  # there where clients are sites, and keep their models
LOGS = ("rounds.jsonl", "clients.jsonl", "timing.jsonl")
MANIFEST = "checkpoint/manifest.json"


class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logs: dict[str, LogSum] = {}
        """What is known of each log that this process writes."""
        self._noted = False

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
        return str(self.read_json(FAILED).get("error", "it does not say why"))

    @property
    def has_checksums(self) -> bool:
        """Runs of earlier versions have none."""
        return (self.path / checksums.FILE).is_file()

    def begin_checksums(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of a run that has written nothing else yet."""
        if not self.has_checksums and not (self.path / "environment.json").is_file():
            self.write_json(checksums.FILE, {"settings": settings})

    def begun_settings(self) -> dict[str, Any] | None:
        """The settings as they were when the run began, or were last accepted."""
        if not self.has_checksums:
            self._say_without_checksums()
            return None
        settings = self.read_json(checksums.FILE).get("settings")
        if not isinstance(settings, dict):
            raise RunError(f"{self.path / checksums.FILE} is corrupt: it has no settings")
        return settings

    def record_settings(
        self, settings: Mapping[str, Any], rounds_done: int, changed: Mapping[str, Any]
    ) -> None:
        """From here on these are the run's settings; the change itself is kept, too."""
        recorded = self.read_json(checksums.FILE)
        entry = {"after_rounds": rounds_done, "changed": changed}
        accepted = [*recorded.get("accepted", []), entry]
        self.write_json(checksums.FILE, recorded | {"settings": settings, "accepted": accepted})

    def _say_without_checksums(self) -> None:
        machine = self.path / "environment.json"
        if machine.is_file() and checksums.KEY in self._read(machine):
            raise RunError(f"{self.path} has lost its {checksums.FILE}")
        say_once(
            f"{self.path} has no checksums: an earlier version wrote it; changes of its files "
            "are not noticed"
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time."""
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locks.locked(self.path / LOCK))
            except TimeoutError:
                raise RunError(f"{self.path} is in use by another process") from None
            yield

    def in_use(self) -> bool:
        """Whether a process works on it."""
        return locks.is_held(self.path / LOCK)

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Keys and values, and their checksum."""
        text = json.dumps(checksums.with_checksum(values), indent=1, allow_nan=False)
        write_atomically(self.path / name, f"{text}\n".encode())

    def write_yaml(self, name: str, values: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, dump_yaml(values).encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """What :meth:`write_json` wrote."""
        values = self._read(self.path / name)
        try:
            return checksums.checked(values, required=self.has_checksums)
        except ValueError as error:
            raise RunError(f"{self.path / name} is corrupt: {error}") from None

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            return checksums.parsed(path.read_bytes())
        except FileNotFoundError:
            raise RunError(f"{self.path} has no {path.relative_to(self.path)}") from None
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise RunError(f"{path} is corrupt: {error}") from None

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        path = self.path / name
        data = (json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n").encode()
        log = self._log(name)
        with open(path, "ab") as file:
            if file.tell() != log.size:
                raise RunError(
                    f"{path} was changed while the run went on: it has {file.tell()} bytes, and "
                    f"{log.size} were written"
                )
            file.write(data)
        log.add(data)

    def _log(self, name: str) -> LogSum:
        if name not in self._logs:
            path = self.path / name
            size = os.path.getsize(path) if path.is_file() else 0
            self._logs[name] = LogSum.of(path, size) if size else LogSum()
        return self._logs[name]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """All whole lines; the last one may be in the making."""
        path = self.path / name
        recorded = self._recorded_log(name)  # before the log, which may grow meanwhile
        if not path.is_file() and not recorded:
            return []
        try:
            data = path.read_bytes()
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from None
        lines = checksums.log_lines(path, data)
        if recorded:
            size, value = recorded
            if self.finished and len(data) > size:
                raise RunError(f"{path} is longer than it was when the run ended")
            found = LogSum()
            found.add(data[:size])
            _check_log(path, found, size, value)
        return lines

    def _recorded_log(self, name: str) -> tuple[int, str] | None:
        """How long a log was at the newest checkpoint, or at the end, and its checksum then."""
        if (self.path / MANIFEST).is_file() and not self.finished:
            try:
                return _size_and_sum(self.read_json(MANIFEST), name)
            except RunError:
                if (self.path / MANIFEST).is_file():  # else the run has just ended
                    raise
        if not self.has_checksums:
            return None
        return _size_and_sum(self.read_json(checksums.FILE), name)

    def note_checkpoint(self) -> None:
        """A run that has a checkpoint once has one until its end."""
        if self.has_checksums and not self._noted:
            recorded = self.read_json(checksums.FILE)
            if not recorded.get("checkpoint"):
                self.write_json(checksums.FILE, recorded | {"checkpoint": True})
            self._noted = True

    def had_checkpoint(self) -> bool:
        return self.has_checksums and bool(self.read_json(checksums.FILE).get("checkpoint"))

    @property
    def lacks_summary(self) -> bool:
        """All rounds are done and their logs are whole: killed in the last moment."""
        if self.finished or not self.has_checksums or (self.path / MANIFEST).is_file():
            return False
        return "log_sums" in self.read_json(checksums.FILE)

    def end_checksums(self) -> None:
        """Of the logs as they are now, when nothing more will be written to them."""
        if self.has_checksums:
            recorded = self.read_json(checksums.FILE)
            logs = {"log_sizes": self.log_sizes(), "log_sums": self.log_sums()}
            self.write_json(checksums.FILE, recorded | logs)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Files without checksums may have any shape: what that raises is one line. With them it
        is a mistake of ours, and stays one."""
        try:
            yield
        except checksums.MALFORMED as error:
            if self.has_checksums:
                raise
            reason = f"{type(error).__name__}: {error}"
            raise RunError(f"{self.path} holds another thing than a run does: {reason}") from None

    def check_logs(self) -> None:
        """Nobody else has written to them since this process began."""
        for name, log in self._logs.items():
            path = self.path / name
            if not path.is_file():
                raise RunError(f"{path} was removed while the run went on")
            _check_log(path, LogSum.of(path, log.size), log.size, log.value())

    def log_sums(self) -> dict[str, str]:
        """The checksum of each log that this process writes."""
        return {name: log.value() for name, log in self._logs.items()}

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

    def cut_logs(self, sizes: Mapping[str, int], sums: Mapping[str, str]) -> None:
        """Forget what was written after a checkpoint (or at all, without one). What was written
        before is as it was."""
        for name in LOGS:
            path, size = self.path / name, sizes.get(name, 0)
            if not path.is_file() and not size:
                continue
            if not path.is_file() or os.path.getsize(path) < size:
                raise RunError(f"{path} is shorter than at the checkpoint: lines are missing")
            found = LogSum.of(path, size)
            if found.value() != sums.get(name):  # perhaps a line can be named
                checksums.log_lines(path, path.read_bytes()[:size], whole=True)
                _check_log(path, found, size, sums.get(name, found.value()))
            os.truncate(path, size)
            self._logs[name] = found


def _check_log(path: Path, found: LogSum, size: int, value: str) -> None:
    if found.size < size:
        raise RunError(f"{path} is shorter than it was: lines are missing")
    if found.value() != value:
        raise RunError(f"{path} is corrupt: its first {size} bytes are not those that were written")


def _size_and_sum(recorded: Mapping[str, Any], name: str) -> tuple[int, str] | None:
    """Of a log; None where nothing is recorded of it."""
    sizes, sums = recorded.get("log_sizes", {}), recorded.get("log_sums", {})
    return (sizes[name], sums[name]) if name in sums and name in sizes else None


def make_directory(path: Path) -> None:
    """A new directory; never one that has something in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(entry.name != LOCK for entry in path.iterdir()):
            raise RunError(
                f"{path} exists already: choose another, or continue it: perfed run --resume {path}"
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


def versions() -> dict[str, Any]:
    packages = {}
    for name in ("perfed", "torch", "numpy", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return {"python": sys.version.split()[0], "packages": packages}


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        **versions(),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": f"{device.type}: {name}",
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def say_other_versions(directory: RunDirectory) -> None:
    """One line where a run goes on with other versions than it began with."""
    before, now = (
        {"python": machine["python"], **machine["packages"]}
        for machine in (directory.read_json("environment.json"), versions())
    )
    other = [
        f"{name} {version} (now {now.get(name, 'not there')})"
        for name, version in before.items()
        if now.get(name) != version
    ]
    if other:
        say_once(
            f"{directory.path} was begun with {', '.join(other)}: from here on last digits may "
            "differ"
        )
