"""Clients on workers: the results of ``stacked``, whatever the number of workers, and whatever
happens to them. Workers are real processes, and die by a real SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import perfed
from perfed import Execution, bench
from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.algorithms.scaffold import Scaffold
from perfed.cli import main
from perfed.core.algorithm import Algorithm, Client
from perfed.core.channel import Channel
from perfed.core.errors import ConfigError, RunError
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tensorfile import load
from perfed.core.tree import Weights, identity
from perfed.engines.ray import engine as ray_engine
from perfed.engines.ray.cluster import Session, session
from perfed.engines.ray.engine import dealt
from perfed.engines.ray.parcel import pack, unpack
from perfed.runs.directory import RunDirectory
from perfed.runs.simulation import Simulation
from tests.conftest import STACKED, TINY, simulate, spec, tiny
from tests.engines.test_stacked import MIXED, Noisy, Stopping, assert_same, flat_numbers
from tests.runs.test_resume import StopAfter, contents

pytest.importorskip("ray", reason="Ray is not installed: pip install 'perfed[ray]'")
pytestmark = pytest.mark.ray

CPU = torch.device("cpu")


def on(workers: int, **settings: Any) -> Execution:
    return Execution(engine="ray", device="cpu", workers=workers, **settings)


def played(experiment: perfed.Experiment, how: Execution, rounds: int = 3) -> Simulation:
    simulation, channel = Simulation(experiment, how=how), Channel()
    simulation.begin(channel)
    for round in range(rounds):
        simulation.play_round(round, channel)
    return simulation


def assert_played_alike(experiment: perfed.Experiment, workers: int, reference: Simulation) -> None:
    simulation = played(experiment, on(workers))
    simulation.engine.collect(simulation.population)
    assert_same(simulation, reference, 1e-8)
    simulation.engine.close()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", list(perfed.algorithms))
def test_every_algorithm_is_the_same_on_two_workers(name: str) -> None:
    """Three architectures, one with BatchNorm."""
    experiment = tiny(algorithm=spec(name), models=MIXED)
    assert_played_alike(experiment, 2, played(experiment, STACKED))


@pytest.mark.usefixtures("float64")
def test_the_number_of_workers_does_not_matter() -> None:
    experiment = tiny(models=MIXED)
    reference = played(experiment, STACKED)
    for workers in (1, 3):
        assert_played_alike(experiment, workers, reference)


@pytest.mark.usefixtures("float64")
def test_a_run_directory_is_the_same_on_every_engine(tmp_path: Path) -> None:
    experiment = tiny(models=MIXED)
    local = perfed.run(experiment, tmp_path / "local", how=STACKED)
    remote = perfed.run(experiment, tmp_path / "remote", how=on(2))
    assert_alike(remote.path, local.path)
    said = json.loads((remote.path / "environment.json").read_text())
    assert (said["engine"], said["workers"]) == ("ray", 2)


def assert_alike(one: Path, other: Path) -> None:
    """Traffic, partition and clients to the bit; numbers within float64's tolerance."""
    assert {file.name for file in one.iterdir()} == {file.name for file in other.iterdir()}
    for file in ("config.yaml", "partition.json", "models/index.json"):
        assert (one / file).read_bytes() == (other / file).read_bytes()
    for file in ("rounds.jsonl", "clients.jsonl"):
        assert flat_numbers(one / file) == pytest.approx(flat_numbers(other / file), rel=1e-8)
    lines = zip(*(RunDirectory(run).lines("rounds.jsonl") for run in (one, other)), strict=True)
    for left, right in lines:
        assert left["traffic_total"] == right["traffic_total"]
    for model in (one / "models").glob("*.safetensors"):
        for name, tensor in load(model).items():
            expected = load(other / "models" / model.name)[name]
            torch.testing.assert_close(tensor, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["perfed-ckt", "scaffold"])
def test_a_run_goes_on_on_another_engine(name: str, tmp_path: Path) -> None:
    experiment = tiny(models=MIXED, algorithm=spec(name), rounds=4)
    whole = perfed.run(experiment, tmp_path / "whole", how=STACKED)
    orders = {
        "away": (on(2, checkpoint_seconds=0), STACKED),
        "back": (Execution(engine="stacked", device="cpu", checkpoint_seconds=0), on(2)),
        "fewer": (on(2, checkpoint_seconds=0), on(1)),
    }
    for order, (first, second) in orders.items():
        path = tmp_path / order
        with pytest.raises(KeyboardInterrupt):
            perfed.run(experiment, path, callbacks=[StopAfter(2)], how=first)
        assert (path / "checkpoint" / "manifest.json").is_file()
        perfed.resume(path, how=second)
        assert_alike(path, whole.path)


def fall(tokens: str) -> None:
    """Kill the process this runs in, if there is a token to be had for it."""
    for token in Path(tokens).iterdir():
        try:
            token.unlink()
        except FileNotFoundError:  # another process was quicker
            continue
        os.kill(os.getpid(), signal.SIGKILL)


class Falling:
    """In round 2 a worker falls: a client of it has trained, but nobody has heard of that."""

    tokens: str

    def client_round(self, client: Client, message: Message) -> Message:
        reply: Message = super().client_round(client, message)  # type: ignore[misc]
        if client.round == 2:  # type: ignore[attr-defined]
            fall(self.tokens)
        return reply


@dataclass(frozen=True)
class FallingCKT(Falling, PerFedCKT):
    tokens: str = option("", "folder of tokens")


@dataclass(frozen=True)
class FallingScaffold(Falling, Scaffold):
    tokens: str = option("", "folder of tokens")


def falling(name: str, tokens: Path, times: int) -> perfed.Experiment:
    tokens.mkdir(exist_ok=True)
    for number in range(times):
        (tokens / str(number)).touch()
    algorithm = {"name": f"{__name__}:{name}", "tokens": str(tokens)}
    return tiny(models=MIXED, rounds=5, algorithm=algorithm)


def deaths(caplog: pytest.LogCaptureFixture) -> list[str]:
    """A busy machine has other lines, such as that an import takes long."""
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if "has died, another takes its place" in line]


@pytest.mark.parametrize(
    ("name", "checkpoint_seconds"), [("FallingCKT", 1e9), ("FallingScaffold", 0)]
)
def test_a_worker_killed_in_a_round_changes_nothing(
    name: str, checkpoint_seconds: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """To the bit, from the last checkpoint or from the beginning, clients on disk or not."""
    tokens = tmp_path / "tokens"
    for run, times in (("undisturbed", 0), ("disturbed", 1)):
        assert not deaths(caplog)
        how = on(2, checkpoint_seconds=checkpoint_seconds, store_limit=0.05)
        perfed.run(falling(name, tokens, times), tmp_path / run, how=how)
    assert not list(tokens.iterdir())
    assert contents(tmp_path / "disturbed") == contents(tmp_path / "undisturbed")
    assert len(deaths(caplog)) == 1
    assert not list((tmp_path / "disturbed").glob("store-*"))


def test_a_worker_that_dies_every_time_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "DEATHS", 2)
    with pytest.raises(RunError, match="a worker died 2 times one after another"):
        perfed.run(falling("FallingCKT", tmp_path / "tokens", 20), tmp_path / "run", how=on(2))
    for token in (tmp_path / "tokens").iterdir():
        token.unlink()
    assert perfed.resume(tmp_path / "run", how=STACKED).summary["finished"]


def test_all_workers_killed_between_rounds_change_nothing(tmp_path: Path) -> None:
    class Kill(perfed.Callback):
        def on_round(self, report: perfed.runs.RoundReport) -> None:
            if report.round == 1:
                workers = banks()
                assert len(workers) >= 2
                for worker in workers:
                    os.kill(worker, signal.SIGKILL)

    experiment = tiny(models=MIXED, rounds=4)
    whole = perfed.run(experiment, tmp_path / "whole", how=on(2))
    perfed.run(experiment, tmp_path / "run", callbacks=[Kill()], how=on(2))
    assert contents(tmp_path / "run") == contents(whole.path)


def processes() -> Iterator[tuple[int, bytes, bytes]]:
    """Number, command line and environment of all that can be read."""
    for folder in Path("/proc").iterdir():
        try:
            yield (
                int(folder.name),
                (folder / "cmdline").read_bytes(),
                (folder / "environ").read_bytes(),
            )
        except (ValueError, OSError):
            continue


def banks() -> list[int]:
    """The workers of this test process."""
    parents = {}
    for number, _, _ in processes():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{number}/stat").read_text()
            parents[number] = int(stat.rpartition(")")[2].split()[1])

    def ours(number: int) -> bool:
        return number == os.getpid() or (number in parents and ours(parents[number]))

    return [number for number, command, _ in processes() if b"Bank" in command and ours(number)]


def test_the_log_of_messages_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "LOG_LIMIT", 10_000)
    simulation = played(tiny(models=MIXED), on(2), 1)
    engine = simulation.engine
    assert isinstance(engine, ray_engine.RayEngine)
    channel = Channel()
    for round in range(1, 6):
        simulation.play_round(round, channel)
        assert sum(share.size for worker in engine.workers for share in worker.log) <= 10_000
    assert len(simulation.population.records) > 3  # collected on the way
    engine.close()


def test_clients_that_keep_nothing_leave_nothing_in_the_log() -> None:
    simulation = played(tiny(algorithm="fedavg"), on(2))
    assert isinstance(simulation.engine, ray_engine.RayEngine)
    assert not any(worker.log for worker in simulation.engine.workers)
    simulation.engine.close()


@pytest.mark.usefixtures("float64")
def test_seeds_side_by_side(tmp_path: Path) -> None:
    comparison = perfed.Comparison(
        experiment=tiny(models=MIXED), algorithms=("scaffold", "local"), seeds=(0, 1)
    )
    alone = perfed.compare(comparison, tmp_path / "alone", how=STACKED)
    beside = perfed.compare(comparison, tmp_path / "beside", how=on(2), side_by_side=True)
    for one, other in zip(alone.results, beside.results, strict=True):
        assert_alike(other.path, one.path)


def test_the_engines_can_be_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REPEATS", 1)
    contenders = [bench.Contender("sequential", "float32", 2), bench.Contender("ray", "float32", 2)]
    _, row = bench.compare_engines(tiny(), contenders, CPU)
    assert row["engine"] == "ray"
    assert row["workers"] == min(os.cpu_count() or 1, 3)  # three clients a round
    assert row["round_ms"] > 0


def test_what_workers_have_to_say_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    models = ["tests.engines.test_stacked:Shuffling"]
    played(tiny(models=models), on(2), 2).engine.close()
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "draws random numbers" in line]) == 1


@pytest.mark.parametrize(
    ("algorithm", "error", "words"),
    [(Noisy(), ConfigError, "one by one"), (Stopping(), ConfigError, "raised StopIteration")],
)
def test_errors_come_out(algorithm: Algorithm, error: type[Exception], words: str) -> None:
    experiment = tiny(algorithm="local", models=["mlp"])
    object.__setattr__(experiment, "algorithm", algorithm)
    simulation = Simulation(experiment, how=on(2))
    with pytest.raises(error, match=words):
        simulation.play_round(0, Channel())
    simulation.engine.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers=2"], "--workers: only the engine ray has workers"),
        (["--workers=-1", "--engine=ray"], "--workers: -1 is out of range"),
        (["--workers=7", "--engine=ray"], "--workers: 7 workers for 6 clients"),
        (["--engine=ray", "--device=cuda:1"], "--device: Ray says which GPU a worker has"),
    ],
)
def test_wrong_choices(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(json.dumps(TINY))
    monkeypatch.setattr(sys, "argv", ["perfed", "run", "tiny.yaml", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"^--engine ray: .*pip install 'perfed\[ray\]'$"):
        Simulation(tiny(), how=on(2))


# A job in the background starts with Ctrl-C ignored, and so would its children.
INTERRUPTIBLE = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from perfed.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing_running(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C goes to the whole group of processes, as from a terminal; kill to the one."""
    config, run, mark = tmp_path / "tiny.yaml", tmp_path / "run", uuid.uuid4().hex
    config.write_text(json.dumps(TINY))
    arguments = ["run", config, f"--out={run}", "--engine=ray", "--workers=2", "--set=rounds=10000"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *arguments],
        env={**os.environ, "PERFED_TEST": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def alive() -> list[bytes]:
        return [command for _, command, own in processes() if mark.encode() in own]

    log = run / "rounds.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.05)
    assert len([command for command in alive() if b"Bank" in command]) == 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, error = process.communicate(timeout=60)
    start, _, end = error.partition("\n\n")
    assert start.startswith(f"run directory: {run}; ")
    assert len(start.splitlines()) == 5  # and which clients have which network
    assert start.endswith("stopping after this round; Ctrl-C again stops at once")
    assert end.strip() == f"interrupted; continue with: perfed run --resume {run}"
    assert process.returncode == 128 + number
    deadline = time.monotonic() + 30  # for what is still on its way out
    while left := alive():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
def test_no_ray_where_one_is_said_to_be(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError, match=f"no Ray at RAY_ADDRESS={address}: .*refused"):
        Session().count("CPU")


def test_a_ray_that_is_running_is_used_and_left_alone() -> None:
    ray = pytest.importorskip("ray")
    with session() as running:
        assert running.count("CPU") >= 1
        other = Session()
        assert other.count("CPU") == running.count("CPU")
        other.close()
        assert ray.is_initialized()


TENSORS = st.builds(
    lambda shape, dtype: (100 * torch.rand(shape)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
)


@given(st.dictionaries(st.text("abc", min_size=1), TENSORS))
def test_a_parcel_arrives_as_it_was(tensors: dict[str, torch.Tensor]) -> None:
    value = {"message": Message(**tensors), "weights": Weights(tensors, {}), "round": 3}
    arrived = unpack(pack(value), CPU)
    assert arrived["round"] == 3
    for given_, got in ((tensors, arrived["message"].arrays), (tensors, arrived["weights"].params)):
        assert given_.keys() == got.keys()
        for name, tensor in given_.items():
            assert tensor.dtype == got[name].dtype
            assert torch.equal(tensor, got[name])


def test_what_many_get_travels_once() -> None:
    model, other = torch.rand(1000), torch.rand(1000)
    messages = {client: Message(model=model, own=other[client]) for client in range(50)}
    parcel = pack(messages)
    size = len(parcel.structure) + sum(array.nbytes for array in parcel.arrays)
    assert size < 2 * model.nbytes + 10_000
    arrived = unpack(parcel, CPU)
    assert len({identity(message["model"]) for message in arrived.values()}) == 1
    assert [float(message["own"]) for message in arrived.values()] == other[:50].tolist()
    arrived[0]["model"].zero_()  # may be written to, and the sender's stays as it was
    assert model.count_nonzero() > 900


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_worker_has_its_share_of_each_architecture(workers: int) -> None:
    models = {"architectures": MIXED, "assign": "list", "per_client": [k % 2 for k in range(40)]}
    population = simulate(clients=40, models=models).population
    homes = dealt(population, workers)
    for architecture in population.modules:
        clients = [k for k in range(40) if population.architectures[k] == architecture]
        counts = [sum(homes[k] == worker for k in clients) for worker in range(workers)]
        assert max(counts) - min(counts) <= 1
