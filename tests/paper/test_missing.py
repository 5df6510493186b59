"""benchmarks/missing.py: what is wanted, how it is counted, and in what time it is run."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import perfed
from perfed.cli import app, paper
from perfed.core.errors import ConfigError
from perfed.paper.tables import table_run
from perfed.runs.study import Study

sys.path.insert(0, str(Path(perfed.__file__).parents[2] / "benchmarks"))
import missing
import paper_blocks


def work(there: int, seconds: Callable[[float], tuple[str, ...]] | None = None) -> missing.Work:
    plain = missing.Work(f"{there} of 2", "page", ["run"], lambda: (there, 2))
    return plain._replace(seconds=seconds) if seconds else plain


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is run takes forty seconds and ends with 3, and nothing else takes any time."""
    commands: list[list[str]] = []
    now = [0.0]

    class Done:
        returncode = 3

    def run(command: list[str], **_: Any) -> Done:
        commands.append(command)
        now[0] += 40
        return Done()

    monkeypatch.setattr(missing.subprocess, "run", run)
    monkeypatch.setattr(missing.time, "monotonic", lambda: now[0])
    return commands


def test_each_has_the_time_that_is_left_and_what_is_whole_is_passed_over(
    told: list[list[str]],
) -> None:
    works = [work(0), work(2), work(1, lambda left: (f"seconds={left:.0f}",)), work(0), work(0)]
    assert missing.run(works, 100, dry=False) == 3
    assert told == [["run", "--seconds", "100"], ["run", "seconds=60"], ["run", "--seconds", "20"]]


def test_without_a_limit_no_command_is_told_of_one(told: list[list[str]]) -> None:
    missing.run([work(0)], float("inf"), dry=False)
    assert told == [["run"]]


def test_dry_runs_nothing(told: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert missing.run([work(1)], 100, dry=True) == 0
    assert not told
    assert "1 of 2: 1 runs are missing" in capsys.readouterr().out


def test_what_is_looked_at_when_a_run_is_over_is_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(missing.readings, "FOLDER", tmp_path)
    (after,) = (work for work in missing.everything() if "--after" in work.command)
    assert after.count() == (0, 6)
    (tmp_path / "after.json").write_text('{"local-seed0": {}, "perfed-ckt-1-seed1": {}}')
    assert after.count() == (2, 6)


def test_all_of_table_1_is_wanted_once() -> None:
    """Of the rows at C=0.1, one part has some and another the rest."""
    parts = {part.name: part for part in paper_blocks.PARTS}
    long, rest = parts["Table 1, C=0.1, 500 rounds"], paper_blocks.OTHERS
    assert sorted([*long.methods, *rest]) == sorted(table_run(1, quick=False).methods)


@pytest.mark.parametrize("part", paper_blocks.PARTS, ids=lambda part: part.name)
def test_the_command_of_a_part_runs_its_runs_and_no_others(
    part: paper_blocks.Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    studies: list[Study] = []

    def instead_of_running(study: Study, *_: Any) -> None:
        studies.append(study)
        raise ConfigError("no more is wanted", "here")  # tables would be written beside the records

    monkeypatch.setattr(paper, "_run_study", instead_of_running)
    CliRunner().invoke(app, part.arguments)
    assert studies[0].folder == part.study().folder
    assert studies[0].experiments == part.study().experiments
