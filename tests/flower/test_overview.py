"""What is said of a run, and what its files tell while nobody works on it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from perfed import cli
from perfed.flower.coordinator import coordinate
from perfed.flower.overview import DEAD, FINISHED, look
from perfed.flower.protocol import JOIN
from perfed.flower.saying import LOG, logging_to
from perfed.flower.services import DeathWatch
from perfed.flower.upkeep import status
from perfed.runs.directory import RunDirectory
from perfed.use import open_model
from tests.flower.setting import desk, write_federation
from tests.flower.test_coordinator import lines, run
from tests.flower.test_upkeep import Killed


def test_a_rounds_line_says_who_is_missing_and_why(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f", options={"deadline": 1}, rounds=2)
    through = desk(
        folder,
        lambda node, task: (
            "the site's own reason" if node == 12 and task.header.round == 1 else None
        ),
    )
    said: list[str] = []
    coordinate(folder / "coordinator.yaml", through, said.append)
    of_rounds = [line for line in said if re.match(r"round \d/2: accuracy", line)]
    assert "missing" not in of_rounds[0]
    assert of_rounds[1].endswith("; missing: client 2 (the site's own reason)")


def test_the_files_of_a_run_whose_process_was_killed_tell_all(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f", rounds=3)
    with pytest.raises(KeyboardInterrupt):
        run(folder, Killed(folder, 1))
    path = folder / "run"
    state = look(path)
    assert (state.state, state.well, state.rounds_done, state.rounds) == (DEAD, False, 1, 3)
    assert [site.rounds for site in state.sites] == [1, 1, 1]
    assert all(site.seen is not None and site.architecture for site in state.sites)
    written = lines(path, "rounds.jsonl")[-1]
    assert state.bytes == sum(written["traffic_total"][f"{way}_bytes"] for way in ("up", "down"))
    assert state.accuracy == pytest.approx(
        sum(site.accuracy or 0 for site in state.sites) / 3, abs=1e-6
    )
    assert json.loads(json.dumps(state.to_mapping()))["well"] is False
    run(folder, desk(folder))
    assert look(path).state == FINISHED


def test_who_may_not_join_is_in_the_status(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f", options={"start_with": 2, "deadline": 1}, rounds=1)
    through = desk(
        folder,
        lambda node, task: (
            "this site wants a rest" if node == 12 and task.header.kind == JOIN else None
        ),
    )
    run(folder, through)
    told = "\n".join(status(folder / "run")[0])
    assert "node 12 may not join: this site wants a rest" in told
    assert re.search(r"^2 +never came .* is not there$", told, re.MULTILINE)


def asked(monkeypatch: pytest.MonkeyPatch, *words: object) -> object:
    monkeypatch.setattr(sys, "argv", ["perfed", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code or 0


def test_before_the_first_run_status_says_how_one_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(monkeypatch, "federation", "status", tmp_path / "run") == 2
    assert "no run has begun in" in (said := capsys.readouterr().err)
    assert "'perfed federation start' begins it" in said


@pytest.mark.parametrize("command", ["check", "ledger", "approve", "backup"])
def test_a_kits_folder_stands_for_the_file_in_it(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_federation(tmp_path / "f", rounds=1)
    run(folder, desk(folder))
    (folder / "site-0.yaml").rename(folder / "site.yaml")
    more = [tmp_path / "new.tar.gz"] if command == "backup" else []
    assert asked(monkeypatch, "site", command, folder, *more) == 0
    assert open_model(folder).card["run"] == "trial"


def test_a_process_that_is_gone_is_noticed_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_federation(tmp_path / "f", rounds=2)
    with pytest.raises(KeyboardInterrupt):
        run(folder, Killed(folder, 1))
    watch = DeathWatch(folder / "run")
    watch.look()
    assert capsys.readouterr().out == ""  # it never saw it at work
    with RunDirectory(folder / "run").locked():
        watch.look()
    watch.look()
    watch.look()
    said = capsys.readouterr().out
    assert said.count("WARNING: nobody is at work") == 1
    assert "its process is gone; start it again with 'perfed federation start'" in said


def test_the_log_has_every_line_with_its_time_and_does_not_grow_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = logging_to(tmp_path)
    tell('a "quoted" line')
    (entry,) = map(json.loads, (tmp_path / LOG).read_text().splitlines())
    assert entry["line"] == 'a "quoted" line'
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry["time"])
    assert capsys.readouterr().out == f'perfed: {entry["time"]} a "quoted" line\n'
    with open(tmp_path / LOG, "a") as file:
        file.write('{"time": "2026')  # killed, or the disk was full
    tell("whole")
    assert json.loads((tmp_path / LOG).read_text().splitlines()[-1])["line"] == "whole"
    capsys.readouterr()
    monkeypatch.setattr("perfed.flower.saying.LARGEST", 10)
    tell("next")
    assert len((tmp_path / LOG).read_text().splitlines()) == 1
    logging_to(tmp_path / "nowhere")("a log that cannot be written stops nobody")
