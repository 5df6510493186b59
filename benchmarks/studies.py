"""What the benchmarks that are studies of many runs share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from perfed.runs.study import Record


def folder_name(text: str) -> str:
    """A run's name as a folder's on any system."""
    return "".join(c if c.isalnum() or c in "-=." else "_" for c in text)


def machines(records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Each kind of machine once, as it was when it was used last; the newest first."""
    found: dict[str, dict[str, Any]] = {}
    for environment in (record["environment"] for record in records.values()):
        kind = json.dumps([environment[key] for key in ("device", "python", "packages")])
        found[kind] = max(environment, found.get(kind, environment), key=lambda e: e["started"])
    return sorted(found.values(), key=lambda environment: environment["started"], reverse=True)
