"""Studies: resumed, in shards, side by side, and what is kept of a run."""

import json
import os
import time
from pathlib import Path

import pytest

import perfed
from perfed import Execution, Experiment
from perfed.core.errors import ConfigError, RunError
from perfed.runs.study import Shard, Study, client_gains
from tests import warm
from tests.conftest import SEQUENTIAL, STACKED, tiny


def experiments(seeds: int = 2) -> dict[str, Experiment]:
    return {
        f"{name}-seed{seed}": tiny(algorithm=name, seed=seed)
        for name in ("local", "fedavg")
        for seed in range(seeds)
    }


class Stop(perfed.Callback):
    """Interrupts the first run that begins after ``finished`` others."""

    def __init__(self, finished: int) -> None:
        self.left = finished

    def on_end(self, result: perfed.Result) -> None:
        self.left -= 1

    def on_round(self, report: perfed.runs.RoundReport) -> None:
        if self.left == 0 and report.round == 1:
            raise KeyboardInterrupt


def numbers(study: Study) -> dict[str, object]:
    return {name: (r["summary"], r["clients"]) for name, r in study.records().items()}


def test_a_record_says_what_the_run_found(tmp_path: Path) -> None:
    study = Study(tmp_path / "study", experiments(1))
    study.run(SEQUENTIAL)
    alone = perfed.run(tiny(algorithm="local"), tmp_path / "alone", how=SEQUENTIAL)
    record = study.records()["local-seed0"]
    assert record["summary"] == alone.summary
    assert record["config"] == alone.experiment.to_mapping()
    last = alone.per_client().query("round == 2")
    assert record["clients"]["test_accuracy"]["personal"] == pytest.approx(
        last["test_accuracy"].tolist(), abs=1e-5
    )
    assert record["clients"]["train_size"] == last["train_size"].tolist()
    assert record["clients"]["rounds_trained"] == [3] * 6
    assert [line[0] for line in record["curve"]["personal"]] == [0, 1, 2]
    assert not (tmp_path / "study" / "runs" / "local-seed0" / "models").exists()


def test_labels_are_counted_in_the_training_part(tmp_path: Path) -> None:
    study = Study(tmp_path, {"run": tiny(algorithm="majority", rounds=1)})
    study.run(SEQUENTIAL)
    partition = json.loads((tmp_path / "runs" / "run" / "partition.json").read_text())
    from sklearn.datasets import load_digits

    labels = load_digits(return_X_y=True)[1]
    wanted = [len(set(labels[client["train"]])) for client in partition["clients"]]
    assert study.records()["run"]["clients"]["train_labels"] == wanted


def test_stopped_it_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, stopped = Study(tmp_path / "a", experiments()), Study(tmp_path / "b", experiments())
    whole.run(SEQUENTIAL)
    with pytest.raises(KeyboardInterrupt):
        stopped.run(SEQUENTIAL, [Stop(finished=1)])
    assert list(stopped.records()) == ["local-seed0"]
    before = (tmp_path / "b" / "records" / "local-seed0.json").stat().st_mtime_ns
    stopped.run(SEQUENTIAL)
    assert numbers(stopped) == numbers(whole)
    assert (tmp_path / "b" / "records" / "local-seed0.json").stat().st_mtime_ns == before


def test_shards_are_apart_and_make_the_whole(tmp_path: Path) -> None:
    whole = Study(tmp_path / "whole", experiments())
    whole.run(SEQUENTIAL)
    together: dict[str, object] = {}
    for number in (1, 2, 3):
        part = Study(tmp_path / str(number), experiments())
        part.run(SEQUENTIAL, shard=Shard(number, 3))
        assert not together.keys() & part.records().keys()
        together |= numbers(part)
    assert together == numbers(whole)


def test_seeds_side_by_side_find_what_they_find_alone(tmp_path: Path) -> None:
    alone, beside = Study(tmp_path / "a", experiments()), Study(tmp_path / "b", experiments())
    alone.run(STACKED)
    beside.run(STACKED, side_by_side=True)
    for name, record in alone.records().items():
        other = beside.records()[name]
        kind = next(iter(record["clients"]["test_accuracy"]))
        assert other["clients"]["test_accuracy"][kind] == pytest.approx(
            record["clients"]["test_accuracy"][kind], abs=1e-3
        )


def test_no_time_nothing_begun(tmp_path: Path) -> None:
    study = Study(tmp_path, experiments())
    study.run(SEQUENTIAL, seconds=0)
    assert study.missing() == list(experiments())


def test_what_diverges_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    wild = tiny(algorithm="fedavg", training={"learning_rate": 1e30, "steps": 5})
    study = Study(tmp_path, {"wild": wild, "tame": tiny(algorithm="local")})
    study.run(SEQUENTIAL)
    records = study.records()
    assert "not finite" in records["wild"]["failed"]
    assert records["tame"]["summary"]["finished"]
    study.run(SEQUENTIAL)
    assert study.missing() == []


def test_a_folder_made_with_other_settings_is_refused(tmp_path: Path) -> None:
    Study(tmp_path, {"run": tiny()}).run(SEQUENTIAL)
    with pytest.raises(RunError, match="made with other settings"):
        Study(tmp_path, {"run": tiny(seed=5)}).run(SEQUENTIAL)


def test_a_run_begun_with_other_settings_is_not_gone_on_with(tmp_path: Path) -> None:
    slow = tiny(training={"learning_rate": 1e-4, "steps": 2})
    with pytest.raises(KeyboardInterrupt):
        Study(tmp_path, {"run": tiny()}).run(
            Execution(device="cpu", checkpoint_seconds=0), [Stop(finished=0)]
        )
    with pytest.raises(RunError, match="begun with other settings"):
        Study(tmp_path, {"run": slow}).run(SEQUENTIAL)
    Study(tmp_path, {"run": tiny()}).run(SEQUENTIAL)


def test_a_finished_run_is_not_a_failure_whatever_was_before(tmp_path: Path) -> None:
    study = Study(tmp_path, {"run": tiny()})
    study.run(SEQUENTIAL)
    (tmp_path / "records" / "run.json").unlink()
    (tmp_path / "runs" / "run" / "failed.json").write_text('{"error": "long ago"}')
    study.run(SEQUENTIAL)
    assert study.records()["run"]["summary"]["finished"]


@pytest.mark.parametrize("text", ["[]", "{}", "{", '"record"'])
def test_what_is_no_record(text: str, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "run.json").write_text(text)
    with pytest.raises(RunError, match=r"run\.json is"):
        Study(tmp_path, {"run": tiny()}).records()


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "a/b", "1/2/3", "-1/2"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a shard"):
        Shard.parse(text)


def test_killed_in_the_middle_the_command_goes_on(tmp_path: Path) -> None:
    command = ["tune", "--json", "--algorithm", "local"]
    command += ["--grid", "training.learning_rate=0.1,0.01"]
    command += ["--set", "rounds=30", "--set", "clients=9", "--set", "clients_per_round=3"]
    command += ["--checkpoint-seconds", "0", "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (tmp_path / "error").open("w") as error:
        process = warm.start(
            [*command, "--out", "tune"], cwd=tmp_path, env=environment, stderr=error
        )
    log = tmp_path / "tune" / "runs" / "learning_rate=0.01-seed1000" / "rounds.jsonl"
    deadline = time.monotonic() + 60
    while not (log.is_file() and log.stat().st_size > 1000):
        assert process.poll() is None, (tmp_path / "error").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    resumed, whole = (
        warm.perform([*command, "--out", folder], cwd=tmp_path, env=environment)
        for folder in ("tune", "whole")
    )
    assert (resumed.returncode, whole.returncode) == (0, 0), resumed.stderr + whole.stderr
    trials = json.loads(resumed.stdout)["trials"]
    assert trials == json.loads(whole.stdout)["trials"]
    assert len(trials) == 2


def test_gains_are_against_the_clients_own_local_model() -> None:
    def record(kind: str, accuracy: list[float]) -> dict[str, object]:
        sizes = {"train_size": [2, 30, 400], "train_labels": [1, 2, 3]}
        return {"clients": {**sizes, "test_accuracy": {kind: accuracy}}}

    found = client_gains(
        record("global", [0.5, 0.9, 0.2]), record("personal", [0.25, 0.5, 0.75]), "global"
    )
    points = [gain for gain, _, _ in found]
    assert points == pytest.approx([25.0, 40.0, -55.0])
    assert [(size, labels) for _, size, labels in found] == [(2, 1), (30, 2), (400, 3)]
