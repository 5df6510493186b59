"""Runs as plain tables, for whatever one likes to analyse them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfed.core.errors import ConfigError, RunError
from perfed.core.extras import needed
from perfed.core.tensorfile import write_atomically
from perfed.report import gather
from perfed.report.gather import Run

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "parquet")


def frames(runs: Sequence[Run]) -> dict[str, pd.DataFrame]:
    """``rounds``: a row for every run, evaluated round and model kind. ``clients``: one for every
    client in these. The run's algorithm, seed and directory come first; rounds count from 0, as in
    the run directory."""
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
        table.insert(0, "algorithm", run.label)
        table.insert(1, "seed", run.seed)
        table.insert(2, "run", str(run.path))
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _encoded(frame: pd.DataFrame, kind: str) -> bytes:
    if kind == "csv":
        text: str = frame.to_csv(index=False)
        return text.encode()
    content: Any = frame.to_parquet(None, index=False, engine="pyarrow")
    return bytes(content)
