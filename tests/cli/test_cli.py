"""The command line as a user meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from perfed.cli import main
from perfed.core.tensorfile import write_atomically
from perfed.engines import Execution
from perfed.runs import Callback, RoundReport, run
from tests import warm
from tests.conftest import TINY, tiny


def perfed(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The exit code of ``perfed ARGUMENTS``, in this process."""
    monkeypatch.setattr(sys, "argv", ["perfed", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> str:
    """The one line that ``perfed ARGUMENTS`` says, with exit code 2."""
    assert perfed(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


@pytest.mark.attack(55)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "roundz=3"], "perfed: roundz: unknown key; did you mean 'rounds'?"),
        (["--set", "rounds=many"], "perfed: rounds: expected a whole number, got str 'many'"),
        (["--set", "algorithm.clusters=4"], "4 clusters of 3 clients: must be at most"),
        (["--set", "clients_per_round=7"], "7 of 6 clients a round: must be at most clients, 6"),
        (["--set", "algorithm=perfed-ct"], "algorithm 'perfed-ct'; did you mean 'perfed-ckt'?"),
        (["--set", "data={name: npz, path: gone.npz}"], "data.path: no such file: 'gone.npz'"),
        (["--set", "data.public=0"], "algorithm: 'perfed-ckt' needs a public set"),
        (["--set", "clients=2000"], "clients: 2000 clients need at least 6000 samples"),
        (["--set", "rounds"], "--set: 'rounds' is not of the form key=value"),
        (["--set", "rounds=[1"], "--set rounds is not valid YAML"),
        (["--set", "models={architectures: [vgg11]}"], "'vgg11' needs images of at least 16×16"),
        (
            ["--set", "algorithm={name: perfed-evidence, caution: .inf}"],
            "algorithm.caution: expected a finite number, got inf",
        ),
        (["--checkpoint-seconds", "inf"], "--checkpoint-seconds: expected a finite number"),
        (["--device", "abacus"], "device 'abacus' cannot be used: must be auto, cpu, cuda,"),
        (["--device", "meta"], "device 'meta' cannot be used"),
        (["--set", "algorithm=:x"], "cannot import ''"),
        (["--resume", "gone"], "takes no FILE"),
    ],
)
def test_bad_input_is_one_line_exit_2_and_nothing_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refusal(monkeypatch, capsys, "run", config, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "is not valid YAML"),
        ("rounds: 3\nrounds: 4\n", "'rounds' is there twice"),
        ("- 1", "holds no keys and values"),
        ("", "holds no keys and values"),
    ],
)
def test_files_that_are_no_configuration(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str,
    message: str,
) -> None:
    (tmp_path / "bad.yaml").write_text(content)
    assert perfed(monkeypatch, "run", tmp_path / "bad.yaml") == 2
    assert message in capsys.readouterr().err
    assert perfed(monkeypatch, "run", tmp_path / "gone.yaml") == 2
    assert "no file and no preset is called" in capsys.readouterr().err
    assert perfed(monkeypatch, "run", tmp_path / "abd.yaml") == 2
    assert f"did you mean '{tmp_path / 'bad.yaml'}'?" in capsys.readouterr().err


def test_a_folder_is_no_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert perfed(monkeypatch, "run", tmp_path) == 2
    assert "is a folder, must be a YAML file or the name of a preset" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("")
    assert perfed(monkeypatch, "run", tmp_path) == 2
    assert f"is a folder with a run: --resume {tmp_path} continues it" in capsys.readouterr().err


def test_what_the_system_refuses_names_the_file_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Not the part that is written first, and no error number."""

    def write() -> None:
        write_atomically(tmp_path, b"")

    monkeypatch.setattr("perfed.cli.app", write)
    assert refusal(monkeypatch, capsys) == f"perfed: {tmp_path}: Is a directory\n"


def test_ctrl_c_while_python_ends_shows_nothing() -> None:
    code = """if True:
        import atexit, os, signal, sys
        atexit.register(os.kill, os.getpid(), signal.SIGINT)  # the first one runs last
        from perfed.cli import main
        sys.argv = ["perfed", "--version"]
        main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")


def test_run_prints_a_table_and_last_the_directory(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert perfed(monkeypatch, "run", config, "--set", "name=mine") == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    (directory,) = (tmp_path / "runs").iterdir()
    assert directory.name.startswith("mine-")
    assert lines[-1] == f"run directory: runs/{directory.name}"
    assert lines[1].split()[:3] == ["algorithm", "model", "accuracy"]  # no progress before it
    assert not any("round 3/3" in line for line in lines)
    told = shown.err.splitlines()
    assert told[0].startswith(f"run directory: runs/{directory.name}; experiment mine, engine ")
    assert "device c" in told[0]
    assert any("round 3/3" in line and "accuracy" in line for line in told)
    assert perfed(monkeypatch, "run", config, "--out", directory) == 2
    advice = f"choose another, or continue it: perfed run --resume {directory}"
    assert f"exists already: {advice}" in capsys.readouterr().err


def test_json_is_all_there_is_on_stdout(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    assert perfed(monkeypatch, "run", config, "--out", tmp_path / "run", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["directory"] == str(tmp_path / "run")
    assert record["config"]["rounds"] == 3
    assert "torch" in record["environment"]["packages"]
    assert 0 <= record["summary"]["models"]["personal"]["last"]["test_accuracy"] <= 1


def test_compare_takes_algorithms_and_seeds(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    arguments = ["-a", "majority", "-a", "perfed-ckt,clusters=1,weight=0.5", "--seeds", "0-1"]
    out = tmp_path / "run"
    assert perfed(monkeypatch, "compare", config, *arguments, "--out", out, "--json") == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["algorithm"], run["seed"]) for run in runs] == [
        ("majority", 0),
        ("majority", 1),
        ("perfed-ckt (c=1, λ=0.5)", 0),
        ("perfed-ckt (c=1, λ=0.5)", 1),
    ]
    assert perfed(monkeypatch, "compare", config, "--seeds", "x") == 2
    assert "--seeds: 'x' is not a list" in capsys.readouterr().err
    assert perfed(monkeypatch, "compare", config, "-a", "local,clusters") == 2
    assert "'clusters' is not of the form key=value" in capsys.readouterr().err


def test_list_names_everything_with_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: other tests have registered things without a meaning."""
    done = warm.perform(["list"], env=os.environ | {"COLUMNS": "400"})  # no line is broken
    assert done.returncode == 0, done.stderr
    out = done.stdout
    for word in (
        "perfed-ckt",
        "vgg13-bn",
        "digits-groups",
        "shards",
        "npz",
        "clusters",
        "balanced_accuracy",
    ):
        assert word in out
    for line in out.splitlines():
        assert len(line.split()) != 1 or line.strip() in (
            "algorithms",
            "models",
            "datasets",
            "partitions",
            "shifts",
            "optimizers",
            "schedules",
            "stages",
            "attacks",
            "metrics",
            "presets",
            "links",
            "studies",
        )
    assert perfed(monkeypatch, "list", "nonsense") == 2
    assert perfed(monkeypatch, "--version") == 0


def test_a_narrow_terminal_cuts_no_name() -> None:
    done = warm.perform(["list", "partitions"], env=os.environ | {"COLUMNS": "40"})
    assert "client-dirichlet" in done.stdout.split()
    assert "  per_client = 2" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 40


# A job in the background starts with Ctrl-C ignored, and so would its children.
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from perfed.cli import main
main()
"""
LONG = ["--set=rounds=150", "--checkpoint-seconds=1000"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The log of a run that nobody stops."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "tiny.yaml").write_text(json.dumps(TINY))
    done = warm.perform(["run", "tiny.yaml", "--out=run", "--json", *LONG], cwd=folder)
    assert done.returncode == 0, done.stderr
    return (folder / "run" / "rounds.jsonl").read_text()


@pytest.mark.attack(50)
@pytest.mark.parametrize(
    ("number", "times"), [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGHUP, 2)]
)
def test_a_signal_leaves_a_resumable_run_and_says_how(
    number: signal.Signals,
    times: int,
    uninterrupted: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "run", config, f"--out={folder}", *LONG],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = folder / "rounds.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.01)
    for _ in range(times):
        process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert error.count("stopping after this round; Ctrl-C again stops at once") == 1
    assert error.splitlines()[-1] == f"interrupted; continue with: perfed run --resume {folder}"
    done = log.read_text().count("\n") - 1  # without the initial set's line
    assert perfed(monkeypatch, "run", "--resume", folder, "--json") == 0
    assert f"continuing after round {done} of 150" in capsys.readouterr().err
    assert log.read_text() == uninterrupted


SAME_SECOND = """
from datetime import datetime
from perfed.runs import directory
class Then:
    now = staticmethod(lambda: datetime(2026, 1, 1))
directory.datetime = Then
from perfed.cli import main
main()
"""


@pytest.mark.attack(49)
def test_runs_that_start_in_one_second_have_folders_of_their_own(
    tmp_path: Path, config: Path
) -> None:
    script = tmp_path / "same_second.py"
    script.write_text(SAME_SECOND)

    def ended(command: str) -> subprocess.CompletedProcess[str]:
        return warm.perform([script, command, config, "--set=rounds=1", "--json"], cwd=tmp_path)

    with ThreadPoolExecutor() as threads:
        done = list(threads.map(ended, ("run", "run", "compare")))
    assert [process.returncode for process in done] == [0, 0, 0], [each.stderr for each in done]
    ends = [(process.stdout, process.stderr) for process in done]
    base = "runs/experiment-20260101-000000"
    folders = [json.loads(out)["directory"] for out, _ in ends]
    assert sorted(folders) == [base, f"{base}-2", f"{base}-3"]
    for folder, (_, told) in zip(folders, ends, strict=True):  # the one it got, not one it wanted
        assert told.startswith(f"run directory: {folder}; experiment ")


class Stop(Callback):
    """A user who has seen enough after two rounds."""

    def on_round(self, report: RoundReport) -> None:
        if report.round == 1:
            raise KeyboardInterrupt


def test_a_resumed_run_says_from_where_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started = {"saved": 0.0, "unsaved": 1000.0}  # seconds between checkpoints
    for name, seconds in started.items():
        how = Execution(checkpoint_seconds=seconds)
        with pytest.raises(KeyboardInterrupt):
            run(tiny(name=name), tmp_path / name, callbacks=[Stop()], how=how)
    for name, said in {
        "saved": "perfed-ckt (c=2, λ=2), seed 0: continuing after round 2 of 3",
        "unsaved": "perfed-ckt (c=2, λ=2), seed 0: from the start: no checkpoint yet",
    }.items():
        assert perfed(monkeypatch, "run", "--resume", tmp_path / name, "--json") == 0
        told = capsys.readouterr().err.splitlines()
        assert told[0] == f"run directory: {tmp_path / name}; experiment {name}"
        assert said in told


def test_who_stops_reading_stops_neither_the_run_nor_its_report(
    tmp_path: Path, config: Path
) -> None:
    out = tmp_path / "run"
    reader, writer = os.pipe()
    with open(writer, "wb") as stdout:
        process = warm.start(["run", config, "--out", out], stdout=stdout)
    os.close(reader)
    process.wait(timeout=120)
    assert (out / "summary.json").is_file()
    assert (out / "report.html").is_file()


def test_a_run_killed_before_its_first_round_can_be_resumed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Path
) -> None:
    assert perfed(monkeypatch, "run", config, "--out", tmp_path / "run", "--json") == 0
    for path in (tmp_path / "run").iterdir():
        if path.name not in ("config.yaml", "models"):
            path.unlink()
    assert perfed(monkeypatch, "run", "--resume", tmp_path / "run", "--json") == 0
    assert (tmp_path / "run" / "summary.json").is_file()


def test_when_everything_diverges_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    arguments = ["-a", "local", "--set", "training.learning_rate=1e30", "--json"]
    assert perfed(monkeypatch, "compare", config, *arguments, "--out", tmp_path / "run") == 2
    record = json.loads(capsys.readouterr().out)
    assert record["runs"] == []
    assert "not finite" in record["failures"][0]


BLOCKER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        allowed = {"torch", "numpy", "sklearn", "scipy", "joblib", "threadpoolctl", "narwhals"}
        blocked = {"yaml", "typer", "click", "rich", "pandas", "matplotlib", "safetensors",
                   "pydantic", "PIL", "tqdm", "hypothesis", "pytest", "ray", "tensorboard",
                   "pyarrow", "mlflow", "wandb"}
        if name.partition(".")[0] in blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import perfed
class Stop(perfed.Callback):
    def on_round(self, report):
        if report.round == 1:
            raise KeyboardInterrupt
experiment = perfed.Experiment(rounds=3, clients=6, clients_per_round=3,
    partition={"name": "groups", "groups": 2}, algorithm={"name": "perfed-ckt", "clusters": 2})
try:
    how = perfed.Execution(checkpoint_seconds=0)
    perfed.run(experiment, sys.argv[1], callbacks=[Stop()], how=how)
except KeyboardInterrupt:
    pass
result = perfed.resume(sys.argv[1])
print(result.table())
result.model(0)
"""


def test_training_and_resuming_need_only_torch_numpy_and_scikit_learn(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "perfed-ckt (c=2, λ=2)" in done.stdout


TALKATIVE = """
import sys
print("imported")

from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        print("built")
        self.last = nn.Linear(64, classes)

    def forward(self, x):
        print("called")
        return self.last(x.flatten(1))

class Leaves(Net):
    def forward(self, x):
        if self.training:
            sys.exit(0)
        return super().forward(x)
"""


@pytest.mark.attack(70)
def test_what_a_network_prints_is_not_among_the_json(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    monkeypatch.chdir(tmp_path)
    arguments = ["run", config, "--set=rounds=1", "--set=models=talkative.py:Net", "--json"]
    assert perfed(monkeypatch, *arguments) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["directory"]
    assert {"imported", "built", "called"} <= set(said.err.splitlines())


@pytest.mark.attack(69)
def test_a_network_that_ends_python_is_no_success(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    config: Path,
) -> None:
    (tmp_path / "leaves.py").write_text(TALKATIVE)
    monkeypatch.chdir(tmp_path)
    for engine in ("sequential", "stacked"):
        arguments = ["run", config, "--set=models=leaves.py:Leaves", "--engine", engine]
        assert perfed(monkeypatch, *arguments) == 2
        assert "code of your own ended Python (sys.exit(0))" in capsys.readouterr().err
