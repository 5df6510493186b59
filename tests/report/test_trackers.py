"""Trackers are told every round once, however often a run is interrupted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import perfed
from perfed.config import parse
from perfed.core.errors import ConfigError, Diverged
from perfed.engines import Execution
from perfed.report.trackers import scalars, trackers
from tests.conftest import TINY, tiny

EVERY_ROUND = Execution(checkpoint_seconds=0)
NEVER = Execution(checkpoint_seconds=1000)


class Stop(perfed.Callback):
    """As Ctrl-C after the second round."""

    def on_round(self, report: perfed.runs.RoundReport) -> None:
        if report.round == 1:
            raise KeyboardInterrupt


def truth(result: perfed.Result) -> dict[str, list[tuple[int, float]]]:
    """Every point as the run directory has it."""
    points: dict[str, list[tuple[int, float]]] = {}
    for line in result.directory.lines("rounds.jsonl"):
        if line["round"] >= 0:
            for name, value in scalars(line.get("evaluation", {}), line["traffic_total"]).items():
                points.setdefault(name, []).append((line["round"] + 1, value))
    return points


def interrupted(path: Path, tracker: str, how: Execution, **changes: Any) -> perfed.Result:
    """A run stopped after its second round and resumed."""
    with pytest.raises(KeyboardInterrupt):
        perfed.run(
            tiny(rounds=4, **changes),
            path,
            callbacks=[*trackers(**{tracker: True}), Stop()],
            how=how,
        )
    return perfed.resume(path, callbacks=trackers(**{tracker: True}))


def test_names_and_numbers() -> None:
    traffic = {"up_parameters": 3, "down_parameters": 4, "up_bytes": 50, "down_bytes": 60}
    numbers = {
        f"{part}_{what}": value
        for part, what, value in [
            ("test", "accuracy", 0.5),
            ("validation", "accuracy", 0.6),
            ("test", "loss", 1.5),
            ("validation", "loss", 1.6),
        ]
    } | {"test_accuracy_worst_decile": 0.1}
    assert scalars({}, traffic) == {"communication/parameters": 7, "communication/bytes": 110}
    alone = scalars({"global": numbers}, traffic)
    assert alone["accuracy/test"] == 0.5
    assert alone["loss/validation"] == 1.6
    both = scalars({"global": {**numbers, "test_accuracy": 0.4}, "personal": numbers}, traffic)
    assert (both["accuracy/test"], both["accuracy/test_global"]) == (0.5, 0.4)


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points: dict[str, list[tuple[int, float]]] = {}
    for file in folder.iterdir():  # each by itself: nothing is hidden because it is there twice
        read = EventAccumulator(str(file), size_guidance={"scalars": 0})
        read.Reload()
        for name in read.Tags()["scalars"]:
            points.setdefault(name, []).extend((e.step, e.value) for e in read.Scalars(name))
    return points


@pytest.mark.parametrize("how", [EVERY_ROUND, NEVER], ids=["checkpoint", "from-the-start"])
def test_tensorboard_reads_every_round_once(how: Execution, tmp_path: Path) -> None:
    result = interrupted(tmp_path / "run", "tensorboard", how, evaluate_every=2)
    found = events(result.path / "tensorboard")
    for name, points in truth(result).items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        assert [v for _, v in found[name]] == pytest.approx([v for _, v in points], rel=1e-6)
    assert [step for step, _ in found["accuracy/test"]] == [2, 4]  # as evaluated
    assert set(found) - set(truth(result)) == {"time/round"}


def test_tensorboard_of_a_comparison_is_a_run_for_each(tmp_path: Path) -> None:
    """Runs side by side take turns, and their points must not mix."""
    values = TINY | {"algorithms": ["local", "fedavg"], "seeds": [0, 1], "rounds": 2}
    del values["algorithm"]
    done = perfed.compare(
        parse(values),  # type: ignore[arg-type]
        tmp_path / "runs",
        callbacks=trackers(tensorboard=True),
        side_by_side=True,
    )
    for result in done.results:
        found, expected = events(result.path / "tensorboard"), truth(result)
        for name in ("accuracy/test", "communication/bytes"):
            assert dict(found[name]) == pytest.approx(dict(expected[name]), rel=1e-6)
            assert len(found[name]) == 2


class FakeMlflow:
    """As much of MLflow's client as is used: runs with parameters, metrics and an end."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []

    def MlflowClient(self) -> FakeMlflow:
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.experiments.get(name)
        return SimpleNamespace(experiment_id=found) if found else None

    def create_experiment(self, name: str) -> str:
        return self.experiments.setdefault(name, f"id of {name}")

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        self.runs.append({"group": experiment_id, "name": run_name, "params": {}, "points": {}})
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.runs) - 1)))

    entities = SimpleNamespace(
        Param=lambda key, value: (key, value),
        Metric=lambda key, value, timestamp, step: (key, (step, value)),
    )

    def log_batch(
        self, run_id: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()
    ) -> None:
        run = self.runs[int(run_id)]
        assert not set(run["params"]) & {key for key, _ in params}  # which MLflow refuses
        run["params"] |= dict(params)
        for key, point in metrics:
            run["points"].setdefault(key, []).append(point)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.runs[int(run_id)]["status"] = status


class FakeWandb:
    """As much of W&B as is used: a run is found again by its id."""

    def __init__(self) -> None:
        self.runs: dict[str, Any] = {}

    def init(self, id: str | None, **settings: Any) -> Any:
        assert settings["resume"] == "allow"
        id = id or f"run{len(self.runs)}"
        if id not in self.runs:
            run = SimpleNamespace(id=id, settings=settings, points={}, exit_code=None)
            run.log = lambda numbers, step, commit: [
                run.points.setdefault(name, []).append((step, value))
                for name, value in numbers.items()
            ]
            run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
            self.runs[id] = run
        return self.runs[id]


@pytest.mark.parametrize("how", [EVERY_ROUND, NEVER], ids=["checkpoint", "from-the-start"])
def test_mlflow_is_told_every_round_once(
    how: Execution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    result = interrupted(tmp_path / "run", "mlflow", how, name="trial")
    (run,) = fake.runs
    assert (run["group"], run["name"]) == ("id of trial", "perfed-ckt-c=2-λ=2-seed0")
    assert run["params"]["training.learning_rate"] == "0.1"
    points = {name: run["points"][name] for name in truth(result)}
    assert points == truth(result)
    assert run["status"] == "FINISHED"
    perfed.run(tiny(rounds=1, name="trial"), tmp_path / "b", callbacks=trackers(mlflow=True))
    assert [run["group"] for run in fake.runs] == ["id of trial"] * 2


@pytest.mark.parametrize("how", [EVERY_ROUND, NEVER], ids=["checkpoint", "from-the-start"])
def test_wandb_is_told_every_round_once(
    how: Execution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    result = interrupted(tmp_path / "run", "wandb", how)
    (run,) = fake.runs.values()
    assert {name: run.points[name] for name in truth(result)} == truth(result)
    assert run.settings["config"]["algorithm"]["clusters"] == 2
    assert run.exit_code == 0


def test_a_run_that_diverges_is_a_failure_at_the_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow, wandb = FakeMlflow(), FakeWandb()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # type: ignore[arg-type]
    everywhere = trackers(tensorboard=True, mlflow=True, wandb=True)
    wild = tiny(training={"learning_rate": 1e30, "steps": 2})
    with pytest.raises(Diverged):
        perfed.run(wild, tmp_path / "run", callbacks=everywhere)
    assert [run["status"] for run in mlflow.runs] == ["FAILED"]
    assert [run.exit_code for run in wandb.runs.values()] == [1]


def test_a_run_tracked_from_its_middle_on_is_told_whole(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        perfed.run(tiny(rounds=4), tmp_path / "run", callbacks=[Stop()], how=EVERY_ROUND)
    result = perfed.resume(tmp_path / "run", callbacks=trackers(tensorboard=True))
    assert [s for s, _ in events(result.path / "tensorboard")["accuracy/test"]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "tensorboard"), ("mlflow", "mlflow"), ("wandb", "wandb")],
)
def test_a_missing_extra_is_one_line(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for loaded in [key for key in sys.modules if key.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{module} is not installed: .* 'perfed\[{name}\]'"):
        trackers(**{name: True})
