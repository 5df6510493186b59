"""``perfed tune`` as a user meets it."""

import json
import sys
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
        (["--grid", "rounds=1..3"], "--trials: say how many settings to try: a range"),
        (["--grid", "rounds=0..3", "--trials", "2"], "rounds: 0 is out of range"),
        (["--grid", "rounds=1..3", "--trials", "2", "--shard", "1/2"], "--shard: a range is "),
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
    assert shown.err.startswith("2 of 2 settings left to try (--trials: fewer")
    before = (out / "tune.json").read_text()
    for other in (["--grid", "rounds=2,3"], [*GRID, "--set", "rounds=4"]):
        error = refusal(monkeypatch, capsys, *search, *other)
        assert error.startswith(f"perfed: --out: {out} holds another search, with another ")
        assert (out / "tune.json").read_text() == before
    assert perfed(monkeypatch, *search, *GRID, "--json") == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads(before)
    assert shown.err == ""  # nothing was run again
    other = ["tune", config, *GRID, "-a", "local", "--trials", "1", "--out", tmp_path / "other"]
    assert perfed(monkeypatch, *other) == 0
    assert capsys.readouterr().err.startswith("1 of 1 settings left to try\n")


def test_a_range_needs_optuna_and_lists_do_not(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    search = ["tune", config, "-a", "local", "--trials", "2", "--out", tmp_path / "out", "--json"]
    ranged = ["--grid", "training.learning_rate=0.01..0.1:log"]
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "optuna", None)
        error = refusal(monkeypatch, capsys, *search, *ranged)
        assert error == (
            "perfed: --grid with a range: optuna is not installed: pip install 'perfed[tune]'\n"
        )
        assert not (tmp_path / "out").exists()
        assert perfed(monkeypatch, *search, *GRID, "--seconds", "0") == 0
    search[-2] = tmp_path / "ranged"
    for trials in ("2", "3"):
        search[5] = trials
        capsys.readouterr()
        assert perfed(monkeypatch, *search, *ranged) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found["trials"]) == found["of"] == int(trials)
        for trial in found["trials"]:
            assert 0.01 <= trial["choice"]["training.learning_rate"] <= 0.1


def test_an_option_of_the_algorithm_needs_no_prefix(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    """As in a study."""
    search = ["tune", config, "-a", "perfed-ckt", "--grid", "weight=0.5,2", "--json"]
    assert perfed(monkeypatch, *search, "--seconds", "0", "--out", tmp_path / "out") == 0
    assert list(json.loads(capsys.readouterr().out)["grid"]) == ["algorithm.weight"]


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
