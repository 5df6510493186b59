"""What a coordinator and a site say: a line with its time on the console, and the same as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LOG = "log.jsonl"
LARGEST = 10 * 2**20  # bytes; then the log before it is let go


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def say(line: str) -> None:
    print(f"perfed: {now()} {line}", flush=True)


def logging_to(folder: Path) -> Callable[[str], None]:
    """Says it, and appends it to ``log.jsonl`` in this folder, if that is there: a log that cannot
    be written stops nobody."""

    def both(line: str) -> None:
        say(line)
        path = folder / LOG
        with suppress(OSError):
            if path.is_file() and path.stat().st_size > LARGEST:
                path.replace(path.with_suffix(".old.jsonl"))
            append(path, {"time": now(), "line": line})

    return both


def append(path: Path, values: Mapping[str, Any]) -> None:
    """A line of JSON of its own, also where the writing of the last one was interrupted."""
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(values).encode() + b"\n")
