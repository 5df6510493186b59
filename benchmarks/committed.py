"""The committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def machine(environment: dict[str, Any]) -> str:
    packages = environment["packages"]
    return (
        f"({environment['device']}, torch {packages['torch']}, numpy {packages['numpy']}, "
        f"Python {environment['python']}, {environment['started'][:10]})"
    )
