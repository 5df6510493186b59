"""``perfed report``, ``perfed export``, and what ``perfed run`` tells trackers."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from tests import warm
from tests.cli.test_cli import perfed, refusal


def test_a_run_ends_with_a_report_to_open_and_more_can_be_made_of_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert perfed(monkeypatch, "run", config, "--out", "one", "--tensorboard") == 0
    assert "report: one/report.html" in capsys.readouterr().out.splitlines()
    (tmp_path / "one" / "report.html").unlink()
    assert perfed(monkeypatch, "report", "one", "--figures", "png", "--figures", "pdf") == 0
    assert capsys.readouterr().out.splitlines() == [
        "report: one/report.html",
        "7 figures: one/report-figures/*.png",
        "7 figures: one/report-figures/*.pdf",
    ]
    assert len(list((tmp_path / "one" / "report-figures").iterdir())) == 14
    assert list((tmp_path / "one" / "tensorboard").iterdir())

    assert perfed(monkeypatch, "run", config, "--set", "seed=1", "--out", "two", "--json") == 0
    assert not (tmp_path / "two" / "report.html").exists()  # --json is for programs
    capsys.readouterr()
    assert perfed(monkeypatch, "report", "one", "two") == 0
    assert capsys.readouterr().out == "report: report.html\n"
    assert "seeds 0, 1" in (tmp_path / "report.html").read_text()

    assert perfed(monkeypatch, "export", "one", "two") == 0
    assert capsys.readouterr().out.splitlines() == ["export/rounds.csv", "export/clients.csv"]
    assert set(pd.read_csv("export/clients.csv")["seed"]) == {0, 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "gone"], "gone is neither a run directory nor a comparison"),
        (["report", "gone", "--figures", "gif"], "--figures: 'gif' is none of png, pdf"),
        (["export", "gone"], "gone is neither a run directory nor a comparison"),
        (["export", "gone", "--format", "xlsx"], "--format: 'xlsx' is none of csv, parquet"),
        (["run", "--mlflow"], "--mlflow: mlflow is not installed: pip install 'perfed[mlflow]'"),
        (["compare", "--wandb"], "--wandb: wandb is not installed: pip install 'perfed[wandb]'"),
    ],
)
def test_bad_wishes_are_one_line_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    assert message in refusal(monkeypatch, capsys, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_report_is_watched_while_another_process_runs(tmp_path: Path, config: Path) -> None:
    """Real processes: one trains and is killed; another draws what there is; when a third has
    finished the run, so has the second."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = tmp_path / "run"
    page = run / "report.html"
    training = warm.start(
        ["run", config, f"--out={run}", "--set=rounds=150", "--json"], env=environment
    )
    while not (run / "timing.jsonl").is_file():
        assert training.poll() is None
        time.sleep(0.01)
    training.kill()
    watching = subprocess.Popen(
        [sys.executable, "-m", "perfed", "report", run, "--watch"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not page.is_file():
        assert watching.poll() is None, watching.communicate()[1]
        time.sleep(0.05)
    text = page.read_text("utf-8")
    assert "Stopped." in text
    assert f"perfed run --resume {run}" in text
    assert 'http-equiv="refresh"' in text
    resumed = warm.perform(["run", "--resume", run, "--json"], env=environment)
    assert resumed.returncode == 0, resumed.stderr
    _, error = watching.communicate(timeout=120)
    assert watching.returncode == 0, error
    assert "Stopped." not in page.read_text("utf-8")
    assert 'http-equiv="refresh"' not in page.read_text("utf-8")
