"""Runs as plain tables, for whatever one likes to analyse them with."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfed.core.errors import ConfigError, RunError
from perfed.core.extras import needed
from perfed.core.schema import plain, to_mapping
from perfed.core.tensorfile import write_atomically
from perfed.report import gather
from perfed.report.gather import Run

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "parquet")


def frames(runs: Sequence[Run]) -> dict[str, pd.DataFrame]:
    """``rounds``: a row for every run, evaluated round and model kind. ``clients``: one for every
    client in these. What the run is comes first (:func:`described`); rounds count from 0, as in the
    run directory."""
    return {
        "rounds": _stacked(runs, lambda run: run.result.per_round()),
        "clients": _stacked(runs, lambda run: run.result.per_client()),
    }


def export(paths: Sequence[Path], folder: Path, kind: str) -> list[Path]:
    """``rounds`` and ``clients`` as CSV or Parquet files in a folder."""
    if kind not in FORMATS:
        raise ConfigError(f"'{kind}' is none of {', '.join(FORMATS)}", "--format")
    if kind == "parquet":
        needed("pyarrow", "parquet", "--format parquet")
    with gather.reading(paths):
        tables = frames([run for run in gather.read(paths) if run.evaluated])
    files = []
    for name, frame in tables.items():
        files.append(folder / f"{name}.{kind}")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(files[-1], _encoded(frame, kind))
    return files


def _stacked(runs: Sequence[Run], frame: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
    import pandas as pd

    if not runs:
        raise RunError("no round has been evaluated yet: there is nothing to export")
    tables = []
    for run in runs:
        table = frame(run)
        for place, (name, value) in enumerate(described(run).items()):
            table.insert(place, name, value)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def described(run: Run) -> dict[str, Any]:
    """What sets a run apart, a column each: its name in reports, what was run on what, and where
    it is. Options are JSON."""
    experiment = run.result.experiment
    algorithm, partition = experiment.algorithm, experiment.partition
    return {
        "label": run.label,
        "algorithm": plain(algorithm)["name"],
        "options": json.dumps(to_mapping(algorithm)),
        "data": experiment.data.label(),
        "partition": plain(partition)["name"],
        "partition_options": json.dumps(to_mapping(partition)),
        "seed": run.seed,
        "run": str(run.path),
    }


def _encoded(frame: pd.DataFrame, kind: str) -> bytes:
    if kind == "csv":
        text: str = frame.to_csv(index=False)
        return text.encode()
    content: Any = frame.to_parquet(None, index=False, engine="pyarrow")
    return bytes(content)
