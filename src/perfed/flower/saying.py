"""What a coordinator and a site say: a line with its time on the console, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

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
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": now(), "line": line}) + "\n")

    return both
