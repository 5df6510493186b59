"""`perfed bench` runs, and its numbers fit together."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from perfed import bench
from perfed.cli import app
from tests.conftest import tiny


def test_the_table_and_the_json_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(tiny(), name="small")
    monkeypatch.setattr(bench, "default_experiment", lambda: small)
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "has_ray", lambda: False)
    monkeypatch.setattr(bench, "peak_flops", lambda device: {"float32": 1e9})
    made: list[dict[str, Any]] = []
    original = bench.bench
    monkeypatch.setattr(bench, "bench", lambda device: made.append(original(device)) or made[-1])
    shown = CliRunner().invoke(app, ["bench", "--device", "cpu"])
    assert shown.exit_code == 0, shown.output
    (result,) = made
    assert json.loads(json.dumps(result)) == result
    sequential, stacked = result["rows"]
    assert (sequential["engine"], stacked["engine"]) == ("sequential", "stacked")
    assert stacked["step_ratio"] == pytest.approx(sequential["step_ms"] / stacked["step_ms"])
    # Three clients, 16 samples each; products of an MLP's layers, forward and twice back.
    assert sequential["samples_per_second"] == pytest.approx(48e3 / sequential["step_ms"])
    small, large = 64 * 8 + 8 * 10, 64 * 12 + 12 * 8 + 8 * 10
    possible = {3 * 16 * 2 * (n * small + (3 - n) * large) for n in range(4)}
    assert sequential["flops_per_step"] in possible
    assert f"{stacked['step_ms']:.2f}" in shown.output
