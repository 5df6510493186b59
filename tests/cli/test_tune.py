"""``perfed tune`` as a user meets it."""

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import perfed, refusal

GRID = ["--grid", "training.learning_rate=0.1,0.01"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-a", "local", "-a", "fedavg", *GRID], "--algorithm: one algorithm is tuned at a time"),
        (["--grid", "rounds=2,2"], "--grid rounds: 2 is there twice; give it once"),
        (["--grid", "rounds=2", "--grid", "rounds=3"], "--grid rounds: is there twice"),
    ],
)
def test_what_is_no_search_is_one_line_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refusal(monkeypatch, capsys, "tune", config, *arguments)
    assert error.startswith(f"perfed: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_folder_keeps_its_search_and_the_same_search_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    out = tmp_path / "tuned"
    search = ["tune", config, "--out", out, "-a", "local"]
    # Nothing is run yet, as if it had been killed: the folder is this search's already.
    assert perfed(monkeypatch, *search, *GRID, "--seconds", "0", "--json") == 0
    assert perfed(monkeypatch, *search, *GRID) == 0
    shown = capsys.readouterr()
    assert "Settings of local\n" in shown.out
    assert f"run directory: {out}; " in shown.err
    before = (out / "tune.json").read_text()
    for other in (["--grid", "rounds=2,3"], [*GRID, "--set", "rounds=4"]):
        error = refusal(monkeypatch, capsys, *search, *other)
        assert error.startswith(f"perfed: --out: {out} holds another search, with another ")
        assert (out / "tune.json").read_text() == before
    assert perfed(monkeypatch, *search, *GRID, "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads(before)
    assert shown.err == ""  # nothing was run again


def test_help_says_where_it_goes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", None)  # CI asks for colours
    assert perfed(monkeypatch, "tune", config, "-a", "local", *GRID, "--json") == 0
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["tune-experiment-local"]
    capsys.readouterr()
    assert perfed(monkeypatch, "tune", "--help") == 0
    out = capsys.readouterr().out
    assert "tune-<name>-<algorithm>" in out
    assert "<time>" not in out
