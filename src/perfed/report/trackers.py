"""Callbacks that tell TensorBoard, MLflow or Weights & Biases how a run goes.

The run directory stays the truth. A run that is resumed, or that is tracked only from its second
half on, tells its tracker every round exactly once: what the tracker lacks is read from the
directory.
"""

from __future__ import annotations

import itertools
import json
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perfed.config import Experiment
from perfed.core.errors import Diverged
from perfed.core.extras import needed
from perfed.core.metrics import EVALUATED_ON, column_name, metrics
from perfed.core.tensorfile import write_atomically
from perfed.runs import Callback, Result, RoundReport
from perfed.runs.comparison import run_name
from perfed.runs.directory import RunDirectory
from perfed.runs.result import headline
from perfed.runs.settings import flat

Scalars = dict[str, float]


def scalars(evaluation: Mapping[str, Any], traffic: Mapping[str, int]) -> Scalars:
    """A round in a few named numbers. Methods can be laid over each other: the model a client
    would use has the same names in all of them."""
    told = {
        f"communication/{what}": float(traffic[f"up_{what}"] + traffic[f"down_{what}"])
        for what in ("parameters", "bytes")
    }
    if not evaluation:
        return told
    used = headline(evaluation)
    for kind, numbers in evaluation.items():
        suffix = "" if numbers is used else f"_{kind}"
        for part, name in itertools.product(EVALUATED_ON, metrics):
            if column_name(part, name) in numbers:  # a run may be older than a metric
                told[f"{name}/{part}{suffix}"] = numbers[column_name(part, name)]
        told[f"accuracy/test_worst_decile{suffix}"] = numbers["test_accuracy_worst_decile"]
    return told


class Tracker(Callback):
    """Several runs may go on at once: each has a place of its own at the tracker.

    The step of a point is the number of rounds done.
    """

    def __init__(self) -> None:
        self._open: dict[Experiment, Any] = {}

    @abstractmethod
    def _begin(self, experiment: Experiment, directory: Path) -> tuple[Any, int]:
        """A handle for this run, and how many rounds the tracker has of it already."""

    @abstractmethod
    def _tell(self, handle: Any, done: int, numbers: Scalars) -> None: ...

    @abstractmethod
    def _end(self, handle: Any, failed: bool) -> None: ...

    def on_start(self, experiment: Experiment, directory: Path, first_round: int) -> None:
        handle, has = self._begin(experiment, directory)
        self._open[experiment] = (handle, has)
        for line in RunDirectory(directory).lines("rounds.jsonl"):
            if has <= line["round"] < first_round:
                numbers = scalars(line.get("evaluation", {}), line["traffic_total"])
                self._tell(handle, line["round"] + 1, numbers)

    def on_round(self, report: RoundReport) -> None:
        handle, has = self._open[report.experiment]
        if report.round >= has:  # a round done again after a resume gives the same numbers
            numbers = scalars(report.evaluation, vars(report.traffic))
            self._tell(handle, report.round + 1, numbers | {"time/round": report.seconds})

    def on_end(self, result: Result) -> None:
        self._end(self._open.pop(result.experiment)[0], failed=False)

    def on_failure(self, experiment: Experiment, error: Diverged) -> None:
        self._end(self._open.pop(experiment)[0], failed=True)


class TensorBoard(Tracker):
    """Event files in the run directory's ``tensorboard`` folder, written anew on a resume."""

    def __init__(self) -> None:
        super().__init__()
        self._writer = needed("torch.utils.tensorboard", "tensorboard", "--tensorboard")

    def _begin(self, experiment: Experiment, directory: Path) -> tuple[Any, int]:
        folder = directory / "tensorboard"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        return self._writer.SummaryWriter(str(folder)), 0

    def _tell(self, handle: Any, done: int, numbers: Scalars) -> None:
        for name, value in numbers.items():
            handle.add_scalar(name, value, done)
        handle.flush()  # a run may be killed

    def _end(self, handle: Any, failed: bool) -> None:
        handle.close()


class Remote(Tracker):
    """A tracker with a memory of its own. The run directory notes under which name the run is
    known there, and how many rounds it has been told."""

    name: str

    def _note(self, directory: Path) -> dict[str, Any]:
        path = directory / f"{self.name}.json"
        known: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        return known

    def _write_note(self, directory: Path, run: str, rounds: int) -> None:
        note = json.dumps({"run": run, "rounds": rounds}) + "\n"
        write_atomically(directory / f"{self.name}.json", note.encode())


class MLflow(Remote):
    """Where MLFLOW_TRACKING_URI says; an experiment of MLflow's is one of ours, by name."""

    name = "mlflow"

    def __init__(self) -> None:
        super().__init__()
        self._mlflow = needed("mlflow", "mlflow", "--mlflow")
        self._client = self._mlflow.MlflowClient()

    def _begin(self, experiment: Experiment, directory: Path) -> tuple[Any, int]:
        note = self._note(directory)
        if not note:
            found = self._client.get_experiment_by_name(experiment.name)
            group = (
                found.experiment_id if found else self._client.create_experiment(experiment.name)
            )
            note = {
                "run": self._client.create_run(group, run_name=run_name(experiment)).info.run_id,
                "rounds": 0,
            }
            settings = flat(experiment.to_mapping()).items()
            params = [self._mlflow.entities.Param(key, str(value)) for key, value in settings]
            self._client.log_batch(note["run"], params=params)
            self._write_note(directory, **note)
        return (directory, note["run"]), note["rounds"]

    def _tell(self, handle: Any, done: int, numbers: Scalars) -> None:
        directory, run = handle
        now = int(1000 * time.time())
        self._client.log_batch(
            run,
            metrics=[self._mlflow.entities.Metric(*item, now, done) for item in numbers.items()],
        )
        self._write_note(directory, run, done)

    def _end(self, handle: Any, failed: bool) -> None:
        self._client.set_terminated(handle[1], "FAILED" if failed else "FINISHED")


class WeightsAndBiases(Remote):
    """A project named as the experiment; W&B's own environment variables say the rest."""

    name = "wandb"

    def __init__(self) -> None:
        super().__init__()
        self._wandb = needed("wandb", "wandb", "--wandb")

    def _begin(self, experiment: Experiment, directory: Path) -> tuple[Any, int]:
        note = self._note(directory)
        run = self._wandb.init(
            project=experiment.name,
            name=run_name(experiment),
            id=note.get("run"),
            resume="allow",
            config=experiment.to_mapping(),
            dir=str(directory),
            reinit="create_new",
        )
        return (directory, run), note.get("rounds", 0)

    def _tell(self, handle: Any, done: int, numbers: Scalars) -> None:
        directory, run = handle
        run.log(numbers, step=done, commit=True)  # at once: a run may be killed
        self._write_note(directory, run.id, done)

    def _end(self, handle: Any, failed: bool) -> None:
        handle[1].finish(exit_code=int(failed))


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "wandb": WeightsAndBiases,
}


def trackers(**wanted: bool) -> list[Callback]:
    """Those of :data:`TRACKERS` that are wanted; raises ConfigError where one is not installed."""
    return [make() for name, make in TRACKERS.items() if wanted.get(name)]
