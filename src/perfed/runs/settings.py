"""The settings of a run that has begun: whether they are still the same, and which may change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perfed.config import Comparison, Experiment, parse, read_mapping
from perfed.core.errors import RunError, shown
from perfed.runs.directory import RunDirectory

FREE = ("about",)  # changes no number
MAY_CHANGE = (
    "rounds",
    "evaluate_every",
    "clients_per_round",
    "selection",
    "averaging",
    "participation",
    "training.learning_rate",
    "training.schedule",
    "training.steps",
    "training.epochs",
    "training.batch_size",
    "training.public_batch_size",
    "training.augment",
)
"""What a run can go on with when it is another than before; the rest decides what clients hold."""
Changes = dict[str, tuple[Any, Any]]
"""By dotted key: the value before, and the value now; None where there is none."""


def read_experiment(path: Path) -> Experiment:
    """Of a run directory, as its config.yaml says now."""
    RunDirectory.open(path)
    experiment = parse(read_mapping(path / "config.yaml"))
    if isinstance(experiment, Comparison):
        raise RunError(f"{path} is not a run directory: its config.yaml has algorithms or seeds")
    return experiment


def changes(before: Experiment, now: Experiment) -> Changes:
    old, new = flat(before.to_mapping()), flat(now.to_mapping())
    return {
        key: (old.get(key), new.get(key))
        for key in {**old, **new}
        if key not in FREE and old.get(key) != new.get(key)
    }


def text_of(changed: Changes) -> str:
    """``rounds is 5, was 3``, for the first ones."""
    first = list(changed.items())[:3]
    more = len(changed) - len(first)
    words = [f"{key} is {_word(now)}, was {_word(before)}" for key, (before, now) in first]
    return "; ".join(words) + (f"; and {more} more" if more else "")


def _word(value: Any) -> str:
    return "not set" if value is None else shown(value)


def changed_since_begun(directory: RunDirectory, now: Experiment) -> Changes:
    """Nothing where the run was begun without a record of its settings."""
    recorded = directory.begun_settings()
    if recorded is None or recorded == now.to_mapping():
        return {}
    before = parse(recorded)  # options that were not there then have their defaults
    assert isinstance(before, Experiment)
    return changes(before, now)


def refuse_changes(directory: RunDirectory, now: Experiment) -> None:
    changed = changed_since_begun(directory, now)
    if not changed:
        return
    way = "put it back"
    if not directory.finished:
        may = all(map(_may_change, changed))
        way += ", or take it over with --accept-changes" if may else ", or begin a new run"
    raise RunError(
        f"{directory.path / 'config.yaml'} was changed since the run began: "
        f"{text_of(changed)}; {way}"
    )


def accept_changes(directory: RunDirectory, rounds_done: int) -> Changes:
    """Take over what config.yaml says now, where a run can go on so."""
    now = read_experiment(directory.path)
    changed = changed_since_begun(directory, now)
    fixed = {key: values for key, values in changed.items() if not _may_change(key)}
    if fixed:
        raise RunError(
            f"{directory.path} cannot go on with another {next(iter(fixed))}: {text_of(fixed)}; "
            "put it back, or begin a new run"
        )
    if "rounds" in changed and now.rounds <= rounds_done:
        raise RunError(
            f"{directory.path / 'config.yaml'}: rounds is {now.rounds}, and {rounds_done} are "
            "done: must be more"
        )
    if changed:
        directory.record_settings(now.to_mapping(), rounds_done, changed)
    return changed


def _may_change(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)


def flat(values: Any, key: str = "") -> dict[str, Any]:
    """By dotted key. A list is one value, but for one that holds keys and values."""
    if isinstance(values, Mapping):
        inner = [flat(value, f"{key}.{name}" if key else name) for name, value in values.items()]
    elif isinstance(values, list | tuple) and any(isinstance(value, Mapping) for value in values):
        inner = [flat(value, f"{key}[{number}]") for number, value in enumerate(values)]
    else:
        return {key: values}
    return {name: value for part in inner for name, value in part.items()}
