"""Runs that die, by a real SIGKILL to a real process, and go on."""

import json
import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from html import escape
from pathlib import Path

import pytest
import torch

import perfed
from perfed import Execution
from perfed.core.errors import Diverged, RunError
from perfed.report.page import draw, html
from perfed.runs import resume_comparison
from perfed.runs.directory import RunDirectory
from perfed.runs.simulation import Simulation
from perfed.runs.stopping import Stopped
from tests import warm
from tests.conftest import STACKED, TINY, tiny

HETEROGENEOUS = TINY | {
    "rounds": 30,
    "models": {"architectures": ["mlp", {"name": "cnn", "batchnorm": True}]},
    "training": {"steps": 3, "public_batchnorm": "separate"},
}
COMPARED = ("rounds.jsonl", "clients.jsonl", "summary.json", "partition.json", "config.yaml")


def command(*arguments: object) -> list[str]:
    return ["run", *map(str, arguments), "--checkpoint-seconds=0"]


def contents(run: Path) -> dict[str, bytes]:
    files = [run / name for name in COMPARED] + sorted((run / "models").iterdir())
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A configuration file, and the run it makes when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = folder / "config.yaml"
    config.write_text(json.dumps(HETEROGENEOUS))
    done = warm.perform(command(config, "--out", folder / "run", "--json"))
    assert done.returncode == 0, done.stderr
    return config, folder / "run"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.attack(49)
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    undisturbed: tuple[Path, Path], tmp_path: Path, stack: ExitStack, seed: int
) -> None:
    config, reference = undisturbed
    run, moments, kills = tmp_path / "run", random.Random(seed), 0
    arguments = command(config, "--out", run)
    log = stack.enter_context((tmp_path / "log").open("wb"))
    while True:
        process = warm.start(arguments, stdout=log, stderr=log)
        rounds = _lines(run)
        while process.poll() is None and _lines(run) <= rounds:
            time.sleep(0.002)  # let it reach a round of its own
        time.sleep(moments.uniform(0, 0.1))
        if process.poll() is not None or kills == 4:
            break
        process.kill()
        kills += 1
        arguments = command("--resume", run)
    assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    assert kills > 0
    assert contents(run) == contents(reference)
    assert not (run / "checkpoint").exists()


def _lines(run: Path) -> int:
    log = run / "rounds.jsonl"
    return log.read_bytes().count(b"\n") if log.is_file() else 0


class StopAfter(perfed.Callback):
    """Dies as a bug would, in the middle of things."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round(self, report: perfed.runs.RoundReport) -> None:
        if report.round + 1 == self.rounds:
            raise KeyboardInterrupt


def interrupted(path: Path, rounds: int = 2, checkpoint_seconds: float = 0) -> Path:
    with pytest.raises(KeyboardInterrupt):
        perfed.run(
            tiny(),
            path,
            callbacks=[StopAfter(rounds)],
            how=Execution(checkpoint_seconds=checkpoint_seconds),
        )
    return path


def assert_resumes_to_the_same_bytes(experiment: perfed.Experiment, folder: Path) -> None:
    """Stopped after two rounds and resumed, a run ends with the files of one that went through."""
    whole = perfed.run(experiment, folder / "whole")
    how = Execution(checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(experiment, folder / "cut", callbacks=[StopAfter(2)], how=how)
    perfed.resume(folder / "cut")
    assert contents(folder / "cut") == contents(whole.path)


def test_a_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    whole = perfed.run(tiny(), tmp_path / "whole")
    path = interrupted(tmp_path / "run", checkpoint_seconds=1e9)
    assert not (path / "checkpoint").exists()
    perfed.resume(path)
    assert contents(path) == contents(whole.path)


def test_a_torn_last_line_is_cut(tmp_path: Path) -> None:
    whole = perfed.run(tiny(), tmp_path / "whole")
    path = interrupted(tmp_path / "run")
    with open(path / "rounds.jsonl", "a") as log:
        log.write('{"round": 2, "clie')
    assert len(RunDirectory(path).lines("rounds.jsonl")) == 3  # readable all the same
    perfed.resume(path)
    assert contents(path) == contents(whole.path)


def test_a_finished_run_is_returned_as_it_is(tmp_path: Path) -> None:
    perfed.run(tiny(), tmp_path / "run")
    before = contents(tmp_path / "run")
    assert perfed.resume(tmp_path / "run").summary["finished"]
    assert contents(tmp_path / "run") == before


def test_a_run_that_is_finished_meanwhile_is_not_begun_again(tmp_path: Path) -> None:
    late = Simulation(tiny())  # a second process: it saw no result when it began
    perfed.run(tiny(), tmp_path / "run")
    before = contents(tmp_path / "run")
    assert late.finish_in(RunDirectory(tmp_path / "run")).summary["finished"]
    assert not late.progress.opened
    assert contents(tmp_path / "run") == before


def test_a_comparison_is_resumed_as_a_run_is(tmp_path: Path) -> None:
    comparison = perfed.Comparison(tiny(rounds=2), ("local",), (0, 1))
    with pytest.raises(KeyboardInterrupt):
        perfed.compare(comparison, tmp_path / "run", callbacks=[StopAfter(1)])
    resumed = perfed.resume(tmp_path / "run")
    assert isinstance(resumed, perfed.ComparisonResult)
    assert [result.summary["finished"] for result in resumed.results] == [True, True]


@pytest.mark.attack(47)
def test_what_cannot_be_resumed_says_why_and_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a run directory"):
        perfed.resume(tmp_path)
    source = interrupted(tmp_path / "run")

    def damaged(name: str) -> Path:
        path = tmp_path / name
        shutil.copytree(source, path)
        return path

    path = damaged("model")
    (victim,) = (path / "checkpoint").glob("server-*")
    victim.write_bytes(victim.read_bytes()[:-5])
    with pytest.raises(RunError, match=r"server-.* is corrupt: its checksum"):
        perfed.resume(path)

    path = damaged("missing")
    (victim,) = (path / "checkpoint").glob("server-*")
    victim.unlink()
    with pytest.raises(RunError, match=r"cannot read .*server-"):
        perfed.resume(path)

    path = damaged("manifest")
    (path / "checkpoint" / "manifest.json").write_text("{")
    with pytest.raises(RunError, match=r"manifest\.json is corrupt"):
        perfed.resume(path)

    path = damaged("log")
    (path / "rounds.jsonl").write_text("")
    with pytest.raises(RunError, match="shorter than at the checkpoint"):
        perfed.resume(path)

    path = damaged("partition")
    record = RunDirectory(path).read_json("partition.json")
    record["clients"][0]["train"].pop()
    RunDirectory(path).write_json("partition.json", record)
    with pytest.raises(RunError, match="another partition"):
        perfed.resume(path)

    path = damaged("busy")
    with RunDirectory(path).locked(), pytest.raises(RunError, match="in use by another process"):
        perfed.resume(path)
    perfed.resume(path)  # and is none the worse for it


def test_an_existing_directory_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(RunError, match="exists already"):
        perfed.run(tiny(), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_an_interrupted_comparison_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    values = TINY | {"algorithms": ["local", "fedavg"], "seeds": [0, 1]}
    del values["algorithm"]
    comparison = perfed.config.parse(values)
    assert isinstance(comparison, perfed.Comparison)
    whole = perfed.compare(comparison, tmp_path / "whole")

    class StopInThird(perfed.Callback):
        runs = 0

        def on_start(self, *_: object) -> None:
            self.runs += 1
            if self.runs == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perfed.compare(comparison, tmp_path / "cut", callbacks=[StopInThird()])
    done = resume_comparison(tmp_path / "cut")
    assert len(done.results) == 4
    assert done.table() == whole.table()


def test_a_method_that_diverges_does_not_take_the_others_with_it(tmp_path: Path) -> None:
    values = TINY | {"algorithms": ["fedavg", "majority"], "seeds": [0]}
    values["training"] = TINY["training"] | {"learning_rate": 1e30}
    del values["algorithm"]
    comparison = perfed.config.parse(values)
    assert isinstance(comparison, perfed.Comparison)
    done = perfed.compare(comparison, tmp_path / "run")
    assert [result.experiment.algorithm.label() for result in done.results] == ["majority"]
    assert "fedavg, seed 0, has no result: round 0: 'model/" in done.table()
    before = (tmp_path / "run" / "fedavg-seed0" / "failed.json").stat().st_mtime_ns
    resume_comparison(tmp_path / "run")  # and is not tried again
    assert (tmp_path / "run" / "fedavg-seed0" / "failed.json").stat().st_mtime_ns == before


def test_a_network_without_numbers_is_found_before_any_training(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"'soft_decisions' of client .* before any training"):
        perfed.run(tiny(models={"architectures": [WithoutNumbers()]}), tmp_path / "run")


class WithoutNumbers(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(1)) / 0


def test_statistics_that_blow_up_are_reported(tmp_path: Path) -> None:
    """BatchNorm hides them from every loss; a model with them could not be loaded."""
    with pytest.raises(Diverged, match=r"'1.running_var' of client \d is not finite"):
        perfed.run(tiny(algorithm="local", models={"architectures": [Loud()]}), tmp_path / "run")


class Loud(torch.nn.Sequential):
    def __init__(self) -> None:
        layers = torch.nn.Flatten(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 10)
        super().__init__(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(1e25 * x)
        return logits


def test_a_model_that_blows_up_is_reported_and_not_averaged(tmp_path: Path) -> None:
    training = TINY["training"] | {"learning_rate": 1e30}
    run = tmp_path / "run"
    with pytest.raises(Diverged, match=r"round \d: '.*' of client \d is not finite"):
        perfed.run(tiny(training=training), run)
    failure = RunDirectory(run).failure
    assert "is not finite" in failure
    report = draw([run])
    assert report.over  # so --watch ends
    assert f"has no result: {escape(failure)}" in html(report)
    before = (run / "failed.json").stat().st_mtime_ns
    with pytest.raises(Diverged, match=r"diverged, and would again; .* a smaller training"):
        perfed.resume(run)
    with pytest.raises(RunError, match=r"has no models: round \d: "):
        perfed.Result(run).model(0)
    assert (run / "failed.json").stat().st_mtime_ns == before


class CtrlC(perfed.Callback):
    """Presses it so often, when the first run has done a round."""

    def __init__(self, round: int, times: int = 1) -> None:
        self.round, self.times = round, times

    def on_round(self, report: perfed.RoundReport) -> None:
        while report.round == self.round and self.times:
            self.times -= 1
            signal.raise_signal(signal.SIGINT)


@pytest.fixture
def listening() -> Iterator[None]:
    """As in a terminal: what starts in the background starts with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


RARELY = Execution(engine="stacked", device="cpu", checkpoint_seconds=1e9)


@pytest.mark.usefixtures("listening")
def test_ctrl_c_saves_the_round_it_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = perfed.run(tiny(), tmp_path / "whole", how=RARELY)
    with pytest.raises(Stopped):
        perfed.run(tiny(), tmp_path / "run", how=RARELY, callbacks=[CtrlC(round=0)])
    said = capsys.readouterr()
    assert said.err == "stopping after this round; Ctrl-C again stops at once\n"
    assert not said.out
    manifest = RunDirectory(tmp_path / "run").read_json("checkpoint/manifest.json")
    assert manifest["next_round"] == 2
    perfed.resume(tmp_path / "run", how=RARELY)
    assert contents(tmp_path / "run") == contents(whole.path)


@pytest.mark.usefixtures("listening")
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        perfed.run(tiny(), tmp_path / "run", how=RARELY, callbacks=[CtrlC(round=0, times=2)])
    assert caught.type is KeyboardInterrupt
    assert len(RunDirectory(tmp_path / "run").lines("timing.jsonl")) == 1
    assert not (tmp_path / "run" / "checkpoint").exists()


@pytest.mark.usefixtures("listening")
def test_ctrl_c_saves_all_runs_side_by_side_and_begins_no_other(tmp_path: Path) -> None:
    base = tiny(rounds=4)
    comparison = perfed.Comparison(base, (base.algorithm, "majority"), (0, 1))
    whole = perfed.compare(comparison, tmp_path / "whole", how=STACKED, side_by_side=True)
    run = tmp_path / "run"
    with pytest.raises(Stopped):
        perfed.compare(comparison, run, how=RARELY, side_by_side=True, callbacks=[CtrlC(round=1)])
    manifests = [json.loads(file.read_text()) for file in run.glob("*/checkpoint/manifest.json")]
    assert sorted(manifest["next_round"] for manifest in manifests) == [2, 3]
    assert not list(run.glob("majority*"))
    assert resume_comparison(run, how=STACKED, side_by_side=True).table() == whole.table()


def test_who_handles_ctrl_c_himself_goes_on_doing_so(tmp_path: Path) -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        perfed.run(tiny(), tmp_path / "run", callbacks=[CtrlC(round=0)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert pressed == [signal.SIGINT]


@pytest.mark.usefixtures("listening")
def test_a_run_in_a_thread_leaves_ctrl_c_to_the_main_one(tmp_path: Path) -> None:
    thread = threading.Thread(target=perfed.run, args=[tiny(), tmp_path / "run"])
    thread.start()
    thread.join()
    assert RunDirectory(tmp_path / "run").finished
