"""What the documentation shows of the screening: every idea that was tried, and what it gave."""

from __future__ import annotations

from typing import Any

from committed import machine, result

from perfed.core import layout
from perfed.core.layout import Table


def screening() -> str:
    """Ideas by settings: gain over local training, the same of small clients, clients harmed."""
    record = result("screening")
    settings = list(record["settings"])
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in record["rows"]:
        cells.setdefault((row["group"], row["idea"]), {})[row["setting"]] = _cell(row)
    rows, last = [], None
    for (group, idea), by_setting in cells.items():
        if group != last:
            rows.append([f"**{group}**", *[""] * len(settings)])
        last = group
        rows.append([idea, *(by_setting[setting] for setting in settings)])
    note = (
        "Points above local training, mean over clients / mean over clients with fewer than 10 "
        "training samples / percent of clients more than 2 points below their own local model. "
        f"Local: test accuracy. Handwritten digits, tuning seeds {record['seeds']} "
        f"{machine(record['environment'])}."
    )
    return layout.markdown([Table("", ("", *settings), rows, note)])


def _cell(row: dict[str, Any]) -> str:
    if row["idea"] == "local":
        return f"{row['accuracy']:.1f} %"
    return f"{row['gain']:+.1f} / {row['gain_small']:+.1f} / {100 * row['harmed']:.0f}"


BLOCKS = {"screening": screening}
