"""Exported tables are the runs' frames."""

import json
from pathlib import Path

import pandas as pd
import pytest

import perfed
from perfed.core.errors import ConfigError, RunError
from perfed.core.schema import to_mapping
from perfed.report.export import export
from tests.conftest import tiny, without_checksums

READ = {"csv": pd.read_csv, "parquet": pd.read_parquet}


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_what_is_exported_is_what_the_runs_hold(
    kind: str, comparison: perfed.ComparisonResult, tmp_path: Path
) -> None:
    files = export([comparison.path], tmp_path / "out", kind)
    assert [file.name for file in files] == [f"rounds.{kind}", f"clients.{kind}"]
    rounds, clients = (READ[kind](file) for file in files)
    assert (len(rounds), len(clients)) == (12 * 6, 12 * 6 * 6)
    for result in comparison.results:
        experiment = result.experiment
        for table, frame in ((rounds, result.per_round()), (clients, result.per_client())):
            mine = (table["label"] == experiment.algorithm.label()) & (
                table["seed"] == experiment.seed
            )
            assert set(table[mine]["run"]) == {str(result.path)}
            assert set(table[mine]["algorithm"]) == {experiment.algorithm.registered_name}
            (options,) = {*table[mine]["options"]}
            assert json.loads(options) == to_mapping(experiment.algorithm)
            assert set(table[mine]["partition"]) == {"groups"}
            (options,) = {*table[mine]["partition_options"]}
            assert json.loads(options)["groups"] == 2
            names = ["label", "algorithm", "options", "data", "partition", "partition_options"]
            assert list(table.columns[:8]) == [*names, "seed", "run"]
            found = table[mine].drop(columns=[*names, "seed", "run"]).reset_index(drop=True)
            pd.testing.assert_frame_equal(found, frame, check_dtype=False)
    export([comparison.path] * 2, tmp_path / "out", kind)  # again, in the same place
    assert len(READ[kind](files[0])) == len(rounds)  # and what is named twice is there once


def test_bad_wishes_leave_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = without_checksums(perfed.run(tiny(rounds=1), tmp_path / "run").path)
    with pytest.raises(ConfigError, match="'xlsx' is none of csv, parquet"):
        export([run], tmp_path / "out", "xlsx")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"pyarrow is not installed: pip install 'perfed\[parq"):
        export([run], tmp_path / "out", "parquet")
    for name in ("rounds.jsonl", "clients.jsonl", "summary.json"):
        (run / name).unlink()
    with pytest.raises(RunError, match="no round has been evaluated yet"):
        export([run], tmp_path / "out", "csv")
    assert not (tmp_path / "out").exists()
