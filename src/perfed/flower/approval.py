"""Which plans a site has approved.

The first plan of a run by that name, within what the site agrees to, is taken and kept. Another one
waits until somebody at the site has looked at it: ``perfed site approve``. In the site's ``state``,

    approved.json  by the run's name: the plans that were approved, the newest last
    waiting.json   the newest plan that was refused because it is another
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perfed.core import tensorfile
from perfed.core.errors import PerfedError, RunError
from perfed.flower.ledger import APPROVED, Ledger
from perfed.flower.plan import Plan, plan_hash, read_json
from perfed.flower.protocol import Refused, one_line
from perfed.runs.settings import flat

MOST_SHOWN = 3  # changes in one line
LONGEST_PART = 50  # characters of a key with its value, and of the value it becomes
SHORT = 12  # characters of a hash: enough to name a plan


class Approvals:
    """Of the site that keeps its state in this folder."""

    def __init__(self, state: Path, ledger: Ledger) -> None:
        self._approved = state / "approved.json"
        self._waiting = state / "waiting.json"
        self._ledger = ledger

    def check(self, plan: Plan, read: Callable[[Any], Plan]) -> None:
        """Raises Refused where this plan must wait. ``read`` makes a plan of what was kept: one of
        an older perfed lacks options, and is the same plan all the same."""
        values = plan.to_mapping()
        plans = self._plans(plan.name)
        if not plans:
            self._add(values, [], "the first plan for a run of this name")
        elif not any(values == kept or _is_same(kept, plan, read) for kept in plans):
            _write(self._waiting, values)
            raise Refused(
                f"the plan is not the one that was approved here: "
                f"{_short(changes(plans[-1], values))}; "
                f"'perfed site approve SITE.YAML {plan_hash(values)[:SHORT]}' would allow it"
            )

    def waiting(self) -> tuple[str, list[str]] | None:
        """The hash of the plan that waits, and what it would change."""
        if not self._waiting.is_file():
            return None
        values = _read(self._waiting)
        (before, *_) = [*self._plans(str(values.get("name")))[-1:], {}]
        return plan_hash(values), changes(before, values)

    def approve(self, hash: str) -> list[str]:
        """By the first characters of its hash: what is approved is what somebody has seen, though
        another plan may have come meanwhile. Returns what changes."""
        waiting = self.waiting()
        if waiting is None:
            raise RunError("no plan waits here")
        if len(hash) < SHORT or not waiting[0].startswith(hash):
            raise RunError(f"'{hash}' does not wait here, but {waiting[0][:SHORT]} does")
        self._add(_read(self._waiting), waiting[1], "perfed site approve")
        self._waiting.unlink()
        return waiting[1]

    def _plans(self, name: str) -> list[dict[str, Any]]:
        plans = _read(self._approved).get(name, [])
        if not isinstance(plans, list) or not all(isinstance(plan, dict) for plan in plans):
            raise RunError(f"{self._approved} is corrupt: '{name}' has no list of plans")
        return plans

    def _add(self, values: dict[str, Any], what: list[str], why: str) -> None:
        self._ledger.add(APPROVED, plan=plan_hash(values), changes=what, why=why)
        name = str(values["name"])
        plans = [*self._plans(name), values]
        _write(self._approved, _read(self._approved) | {name: plans})


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """``training.steps: 10 → 50``, for every key in which two plans differ."""
    old, new = _flat(before), _flat(after)
    return [
        f"{key}: {_value(old, key)} → {_value(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if _value(old, key) != _value(new, key)
    ]


def _flat(values: Mapping[str, Any]) -> dict[str, str]:
    """As JSON."""
    return {key: json.dumps(value, ensure_ascii=False) for key, value in flat(values).items()}


def _value(flat: Mapping[str, str], key: str) -> str:
    return flat.get(key, "nothing")


def _short(what: list[str]) -> str:
    """A few of them, each short: the line must have room for the command at its end."""
    shown = [" → ".join(_cut(part) for part in change.split(" → ", 1)) for change in what]
    more = f" and {len(what) - MOST_SHOWN} more" if len(what) > MOST_SHOWN else ""
    return one_line(", ".join(shown[:MOST_SHOWN]) + more)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_PART else f"{text[:LONGEST_PART]}…"


def _is_same(kept: Any, plan: Plan, read: Callable[[Any], Plan]) -> bool:
    try:
        return read(kept) == plan
    except PerfedError:  # the site agrees to less than it did then
        return False


def _read(path: Path) -> dict[str, Any]:
    values = read_json(path) if path.is_file() else {}
    if not isinstance(values, dict):
        raise RunError(f"{path} is corrupt: it holds a {type(values).__name__}")
    return values


def _write(path: Path, values: Any) -> None:
    tensorfile.write_atomically(path, f"{json.dumps(values, indent=1)}\n".encode())
