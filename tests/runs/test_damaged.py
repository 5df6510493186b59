"""Damaged run directories: every file of one, damaged in many ways, under every command that reads
it. One line and exit code 2, or the command does its work; never a traceback."""

import contextlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import perfed
from perfed.cli import main
from perfed.core import tensorfile
from perfed.core.errors import PerfedError, RunError
from perfed.runs import checksums
from perfed.runs.directory import LOCK, RunDirectory
from tests.conftest import STACKED, tiny, without_checksums

OFTEN = perfed.Execution(engine="stacked", device="cpu", checkpoint_seconds=0)


class StopAfterTwo(perfed.Callback):
    def on_round(self, report: perfed.RoundReport) -> None:
        if report.round == 1:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run and one that was stopped; and the same as versions without checksums wrote
    them."""
    folder = tmp_path_factory.mktemp("runs")
    experiment = tiny(algorithm="fedavg")
    perfed.run(experiment, folder / "finished", how=STACKED)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(experiment, folder / "stopped", how=OFTEN, callbacks=[StopAfterTwo()])
    for name in ("finished", "stopped"):
        without_checksums(Path(shutil.copytree(folder / name, folder / f"earlier-{name}")))
    return {path.name: path for path in folder.iterdir()}


Damage = Callable[[bytes], bytes | None]
WRITTEN: dict[str, Damage] = {
    "gone": lambda data: None,
    "null": lambda data: b"null\n",
    "another object": lambda data: b'{"round": 0}\n',
    "deep": lambda data: b"[" * 100_000 + b"\n",
    "a byte 0xff": lambda data: data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :],
    "cut": lambda data: data[: len(data) // 2],
    "first line gone": lambda data: data.partition(b"\n")[2],
    "a digit": lambda data: data.replace(b"1", b"7", 1),
}
SHAPED: dict[str, Damage] = {
    "values are null": lambda data: _each_value(data, None),
    "values are deep": lambda data: _each_value(data, [[{"x": [1]}]]),
    "values are text": lambda data: _each_value(data, "x"),
    "values are huge": lambda data: _each_value(data, 10**400),
}
"""JSON with the keys that were there: where no checksum is, it is read on."""


def _each_value(data: bytes, value: object) -> bytes:
    lines = data.split(b"\n") if data.startswith(b'{"round"') else [data]
    try:
        parsed = [json.loads(line) for line in lines if line.strip()]
    except ValueError:
        return b"x: " + data
    changed = [{k: v if k == "round" else value for k, v in one.items()} for one in parsed]
    return b"".join(json.dumps(one).encode() + b"\n" for one in changed)


def files_of(run: Path) -> list[Path]:
    """All of them; of tensors one in each folder."""
    files = [file for file in sorted(run.rglob("*")) if file.is_file() and file.name != LOCK]
    tensors = {file.parent: file for file in files if file.suffix == ".safetensors"}
    return [f for f in files if f.suffix != ".safetensors" or tensors[f.parent] is f]


def said(*arguments: object) -> str:
    """What ``perfed ARGUMENTS`` says where it ends with 2; empty where it does its work."""
    errors = io.StringIO()
    before = sys.argv
    sys.argv = ["perfed", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            main()
    except SystemExit as end:
        return errors.getvalue() if end.code == 2 else ""
    finally:
        sys.argv = before
    return ""


def loaded(run: Path) -> str:
    try:
        perfed.Result(run).model(0)
    except PerfedError as error:
        return f"perfed: {error}\n"
    return ""


COMMANDS: list[Callable[[Path], str]] = [
    lambda run: said("run", "--resume", run, "--engine", "stacked", "--json"),
    lambda run: said("export", run),
    loaded,
    lambda run: said("report", run),
]


@pytest.mark.attack(42, 43, 44, 46)
@pytest.mark.parametrize("name", ["stopped", "finished", "earlier-stopped", "earlier-finished"])
def test_a_damaged_run_directory_is_one_line(
    runs: dict[str, Path], name: str, tmp_path: Path
) -> None:
    """Each file with each damage, under one command; the next pair under the next. (A report reads
    no more than an export does, and takes longer.)"""
    source, number, earlier = runs[name], 0, name.startswith("earlier")
    commands = COMMANDS if earlier else COMMANDS[:3]
    for file in files_of(source):
        content = file.read_bytes()
        for kind, damage in (SHAPED if earlier else WRITTEN).items():
            changed, number = damage(content), number + 1
            run = tmp_path / str(number)
            shutil.copytree(source, run)
            victim = run / file.relative_to(source)
            if changed is None:
                victim.unlink()
            else:
                victim.write_bytes(changed)
            error = commands[number % len(commands)](run)
            lines = [line for line in error.splitlines() if line.startswith("perfed: ")]
            assert len(lines) == bool(error), (victim, kind, error)


@pytest.fixture
def stopped(runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs["stopped"], tmp_path / "run"))


def edit(run: Path, before: str, after: str) -> None:
    text = (run / "config.yaml").read_text()
    assert before in text
    (run / "config.yaml").write_text(text.replace(before, after))


@pytest.mark.attack(40)
@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("learning_rate: 0.1", "learning_rate: 0.5", "training.learning_rate is 0.5, was 0.1"),
        ("steps: 2", "steps: 3", "training.steps is 3, was 2"),
        ("rounds: 3", "rounds: 1", "rounds is 1, was 3"),
        ("seed: 0", "seed: 1", "seed is 1, was 0; put it back, or begin a new run"),
        ("name: fedavg", "name: fedprox", "algorithm.name is 'fedprox', was 'fedavg'"),
    ],
)
def test_a_changed_setting_is_named(stopped: Path, before: str, after: str, message: str) -> None:
    edit(stopped, before, after)
    with pytest.raises(RunError, match=re.escape(message)):
        perfed.resume(stopped)
    with pytest.raises(RunError, match=re.escape(message)):
        perfed.Result(stopped)


@pytest.mark.attack(40)
def test_a_change_that_is_meant_is_accepted_and_recorded(
    stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(stopped, "rounds: 3", "rounds: 2")
    assert "rounds is 2, and 2 are done: must be more" in said(
        "run", "--resume", stopped, "--accept-changes"
    )
    edit(stopped, "rounds: 2", "rounds: 4")
    assert "take it over with --accept-changes" in said("run", "--resume", stopped)
    result = perfed.resume(stopped, how=STACKED, accept_changes=True)
    assert "rounds is 4, was 3" in caplog.text
    assert len(result.directory.lines("rounds.jsonl")) == 4
    recorded = result.directory.read_json(checksums.FILE)
    assert recorded["accepted"] == [{"after_rounds": 2, "changed": {"rounds": [3, 4]}}]
    edit(stopped, "rounds: 4", "rounds: 5")  # now it is over
    with pytest.raises(RunError, match=r"rounds is 5, was 4; put it back$"):
        perfed.resume(stopped, accept_changes=True)


@pytest.mark.attack(40)
@pytest.mark.parametrize(("before", "after"), [("seed: 0", "seed: 1"), ("hidden:", "batchnorm:")])
def test_what_a_run_cannot_go_on_with_is_not_accepted(
    stopped: Path, before: str, after: str
) -> None:
    edit(stopped, before, after)
    assert said("run", "--resume", stopped, "--accept-changes").startswith("perfed: ")
    assert RunDirectory(stopped).begun_settings() == tiny(algorithm="fedavg").to_mapping()


def test_what_changes_no_number_may_be_changed(stopped: Path) -> None:
    edit(stopped, "about: ''", "about: Another sentence.")
    assert perfed.Result(stopped).experiment.about == "Another sentence."
    (stopped / "config.yaml").write_text("# a comment\n" + (stopped / "config.yaml").read_text())
    assert perfed.resume(stopped, how=STACKED).summary["finished"]


@pytest.mark.attack(40)
def test_a_comparison_is_of_the_runs_it_lists(tmp_path: Path) -> None:
    comparison = perfed.Comparison(tiny(rounds=1), ("majority",), (0,))
    run = perfed.compare(comparison, tmp_path / "run", how=STACKED).path
    file = run / "comparison.yaml"
    file.write_text(file.read_text().replace("rounds: 1", "rounds: 2"))
    assert "is not what majority-seed0 ran: rounds is 2, was 1" in said("run", "--resume", run)


@pytest.mark.attack(41)
def test_other_versions_are_said_and_the_run_goes_on(
    stopped: Path, caplog: pytest.LogCaptureFixture
) -> None:
    machine = RunDirectory(stopped).read_json("environment.json")
    machine["packages"] |= {"torch": "1.0", "gone": "3"}
    RunDirectory(stopped).write_json("environment.json", machine | {"python": "2.7.1"})
    assert perfed.resume(stopped, how=STACKED).summary["finished"]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "was begun with python 2.7.1 (now 3." in line
    assert "torch 1.0 (now " in line
    assert "gone 3 (now not there)" in line


@pytest.mark.attack(42)
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize(
    ("key", "value"),
    [("next_round", 999), ("next_round", 1), ("next_round", True), ("trained", [1]),
     ("traffic", {"x": 1}), ("log_sizes", {"rounds.jsonl": -1}), ("files", {}), ("checksum", None)],
)  # fmt: skip
def test_a_manifest_is_what_it_was(
    runs: dict[str, Path], tmp_path: Path, key: str, value: object, earlier: bool
) -> None:
    source = runs["earlier-stopped" if earlier else "stopped"]
    run = Path(shutil.copytree(source, tmp_path / "run"))
    file = run / "checkpoint" / "manifest.json"
    manifest = json.loads(file.read_text())
    if key == "checksum":
        manifest["files"]["server"]["checksum"] = value
    else:
        manifest[key] = value
    file.write_text(json.dumps(manifest))
    with pytest.raises(RunError, match=r"manifest\.json|rounds\.jsonl"):
        perfed.resume(run)


def test_a_manifest_names_no_file_elsewhere(runs: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs["stopped"], tmp_path / "run"))
    manifest = RunDirectory(run).read_json("checkpoint/manifest.json")
    manifest["files"]["server"]["file"] = "../../elsewhere.safetensors"
    RunDirectory(run).write_json("checkpoint/manifest.json", manifest)
    with pytest.raises(RunError, match=r"'../../elsewhere\.safetensors' is not the name of a file"):
        perfed.resume(run)


@pytest.mark.attack(43, 44)
@pytest.mark.parametrize("log", ["rounds.jsonl", "clients.jsonl", "timing.jsonl"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:40] + b"\xff" + data[41:], "line 1, is corrupt: 'utf-8' codec"),
        (lambda data: re.sub(rb"0\.(\d)", _other_digit, data, count=1), "are not those that were"),
        (lambda data: data.partition(b"\n")[2], "lines are missing"),
    ],
    ids=["0xff", "digit", "line"],
)
def test_a_damaged_log_is_found_before_anything_is_computed(
    stopped: Path, log: str, damage: Callable[[bytes], bytes], message: str
) -> None:
    (stopped / log).write_bytes(damage((stopped / log).read_bytes()))
    played: list[int] = []

    class Count(perfed.Callback):
        def on_round(self, report: perfed.RoundReport) -> None:
            played.append(report.round)

    with pytest.raises(RunError, match=message):
        perfed.resume(stopped, how=STACKED, callbacks=[Count()])
    assert not played
    with pytest.raises(RunError, match=f"{log}.*{message}"):
        RunDirectory(stopped).lines(log)


def _other_digit(match: re.Match[bytes]) -> bytes:
    return b"0.%d" % (9 - int(match[1]))


@pytest.mark.attack(44)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: data.index(b"\n") + 1] if b"\n" in data else data, "was changed whil"),
        (lambda data: re.sub(rb"0\.(\d)", _other_digit, data, count=1), "are not those that were"),
    ],
    ids=["lines deleted", "digit changed"],
)
def test_a_log_that_somebody_changes_meanwhile(
    tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    class Meddle(perfed.Callback):
        def on_round(self, report: perfed.RoundReport) -> None:
            if report.round == 1:
                log = tmp_path / "run" / "rounds.jsonl"
                log.write_bytes(change(log.read_bytes()))

    with pytest.raises(RunError, match=message):
        perfed.run(tiny(algorithm="majority"), tmp_path / "run", callbacks=[Meddle()])


@pytest.mark.attack(45)
def test_a_damaged_model_does_not_load(runs: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs["finished"], tmp_path / "run"))
    network = perfed.Result(run).model(0)
    (file,) = (run / "models").glob("*0000*")
    assert isinstance(perfed.load_model(file, network), torch.nn.Module)
    content = file.read_bytes()
    file.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    for load in (lambda: perfed.load_model(file, network), lambda: perfed.Result(run).model(0)):
        with pytest.raises(RunError, match="its checksum is not that of its content"):
            load()
    tensors = {name: t.detach().clone() for name, t in network.state_dict().items()}
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    tensorfile.save(file, tensors)  # by somebody else, without a checksum
    with pytest.raises(RunError, match=r"'.*' is not finite"):
        perfed.load_model(file, network)
    tensorfile.save(file, {name: torch.zeros(1) for name in tensors})
    with pytest.raises(RunError, match=r"'.*' is 1, the network's "):
        perfed.load_model(file, network)


def test_runs_without_checksums_are_read_and_go_on(
    runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Path(shutil.copytree(runs["earlier-stopped"], tmp_path / "earlier"))
    assert perfed.resume(run, how=STACKED).summary["finished"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"{run} has no checksums: an earlier version wrote it; changes of its files "
                     "are not noticed"]  # fmt: skip
    run = Path(shutil.copytree(runs["stopped"], tmp_path / "stopped"))
    (run / checksums.FILE).unlink()
    with pytest.raises(RunError, match=r"has lost its checksums\.json"):
        perfed.resume(run)


@pytest.mark.attack("manifest-deleted", "summary-deleted")
def test_what_is_deleted_costs_nothing_that_was_computed(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs["stopped"], tmp_path / "stopped"))
    (run / "checkpoint" / "manifest.json").unlink()
    with pytest.raises(RunError, match=r"has lost its checkpoint/manifest\.json"):
        perfed.resume(run)
    run = Path(shutil.copytree(runs["finished"], tmp_path / "finished"))
    before = (run / "summary.json").read_bytes()
    (run / "summary.json").unlink()
    perfed.resume(run)
    assert (run / "summary.json").read_bytes() == before


@pytest.mark.attack(44)
def test_a_finished_log_does_not_grow(runs: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs["finished"], tmp_path / "run"))
    with open(run / "rounds.jsonl", "a") as file:
        file.write('{"round": 3}\n')
    with pytest.raises(RunError, match=r"rounds\.jsonl is longer than it was when the run ended"):
        perfed.Result(run).per_round()
