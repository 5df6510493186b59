"""The loop: config → data and models → algorithm ⇄ channel ⇄ engine → run directory."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from perfed.config import Comparison, Experiment, parse, read_mapping
from perfed.core import tensorfile
from perfed.core.algorithm import Algorithm, ClientInfo, Judged, Reply, Server
from perfed.core.channel import Channel, Traffic
from perfed.core.errors import ConfigError, Diverged, RunError
from perfed.core.message import Message
from perfed.core.metrics import summarize
from perfed.core.schema import plain
from perfed.core.selection import select_clients
from perfed.core.streams import torch_stream
from perfed.core.threads import WRITERS, cpu_threads, in_threads
from perfed.core.tree import Weights, find_not_finite, flatten
from perfed.data import build_federation
from perfed.engines import Call, ClientStore, Engine, Execution, Outcome, Population
from perfed.engines.execution import fitting_threads, largest_model
from perfed.runs.checkpoint import Checkpoints, Progress
from perfed.runs.directory import RunDirectory, default_path, environment
from perfed.runs.result import Result, headline

AUTOMATIC = Execution()
MODELS_AT_ONCE = 64  # are in memory while the final ones are written
CHECKPOINT_SHARE = 0.05  # of a run's time, at most, is spent writing checkpoints
T = TypeVar("T")
Steps = Generator[Call, Any, T]
"""A computation that hands out calls to clients, and goes on when it gets what they gave."""


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """What a callback learns after each round."""

    experiment: Experiment
    round: int
    accuracy: float | None
    """Mean test accuracy, where this round was evaluated."""
    traffic: Traffic
    seconds: float


class Callback:
    """Something to do as a run goes on; override what is needed."""

    def on_start(self, experiment: Experiment, directory: Path, first_round: int) -> None: ...

    def on_round(self, report: RoundReport) -> None: ...

    def on_end(self, result: Result) -> None: ...


def run(
    experiment: Experiment,
    directory: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    how: Execution = AUTOMATIC,
) -> Result:
    """Run an experiment in a new directory (``runs/<name>-<time>`` unless told otherwise)."""
    simulation = Simulation(experiment, callbacks, how)
    path = Path(directory) if directory else default_path(experiment.name)
    return simulation.finish_in(RunDirectory.create(path))


def resume(
    directory: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    how: Execution = AUTOMATIC,
) -> Result:
    """Continue a run from its newest checkpoint; a finished one is returned as it is."""
    opened = RunDirectory.open(Path(directory))
    if opened.finished:
        return Result(opened.path)
    experiment = parse(read_mapping(opened.path / "config.yaml"))
    if isinstance(experiment, Comparison):
        raise RunError(f"{directory} is a comparison, not a single run")
    return Simulation(experiment, callbacks, in_recorded_precision(opened, how)).finish_in(opened)


def in_recorded_precision(directory: RunDirectory, how: Execution) -> Execution:
    """A run goes on in the numbers it began with."""
    if not (directory.path / "environment.json").is_file():  # killed before its first round
        return how
    began: Any = directory.read_json("environment.json").get("precision", "float32")
    if how.precision not in ("auto", began):
        raise RunError(f"{directory.path} was begun in {began}: it cannot go on in {how.precision}")
    return dataclasses.replace(how, precision=began)


class Simulation:
    """One experiment, from its first round to its last."""

    def __init__(
        self,
        experiment: Experiment,
        callbacks: Iterable[Callback] = (),
        how: Execution = AUTOMATIC,
        engine: Engine | None = None,
    ) -> None:
        self.experiment = experiment
        self.algorithm: Algorithm = experiment.algorithm
        self.callbacks = list(callbacks)
        self.how = how
        self.device = how.torch_device()
        self.federation = build_federation(
            experiment.data,
            experiment.partition,
            experiment.split,
            experiment.clients,
            experiment.seed,
        )
        if self.algorithm.needs_public_set and not len(self.federation.samples.public_x):
            raise ConfigError(
                f"'{self.algorithm.registered_name}' needs a public set, and the data has none: "
                "set data.public to the number of samples to hold out",
                "algorithm",
            )
        self.population = Population(
            self.algorithm,
            self.federation,
            experiment.models,
            experiment.training,
            experiment.seed,
            self.device,
            ClientStore(self.device, how.store_bytes()),
        )
        self.engine = engine or how.build_engine(largest_model(self.population))
        self.population.engine = self.engine
        everyone = self.algorithm.trains_everyone()
        self.engine.expect(
            self.population, experiment.clients if everyone else experiment.clients_per_round
        )
        self._population = dict(Counter(self.population.architectures))
        self.progress = Progress(trained=[0] * experiment.clients)
        self.changed: set[int] = set()
        self.seconds: dict[str, float] = {}
        self.client_facts: list[Mapping[str, float]] = []

    def steps(self, directory: RunDirectory) -> Steps[Result]:
        """The whole run in a locked directory, from its start or from its newest checkpoint."""
        directory.remove_leftovers()
        if not (directory.path / "config.yaml").is_file():
            directory.write_yaml("config.yaml", self.experiment.to_mapping())
        if not (directory.path / "partition.json").is_file():  # a new run, or killed before it was
            self._write_origin(directory)
        elif directory.read_json("partition.json") != self._partition_record():
            raise RunError(
                f"{directory.path}: the data now gives another partition than the recorded "
                "one; the dataset or the version of perfed has changed"
            )
        checkpoints = Checkpoints(directory)
        saved = checkpoints.load(self.device)
        if saved is not None:
            self.progress, records = saved
            self.population.records.update(records)
        directory.cut_logs(self.progress.log_sizes)
        return (yield from self._run(directory, checkpoints))

    def finish_in(self, directory: RunDirectory) -> Result:
        """Run to the end."""
        with directory.locked(), cpu_threads(fitting_threads(self.population)):
            try:
                return drive(self.steps(directory), self.engine)
            finally:
                self.engine.close()
                directory.remove_leftovers()

    def _write_origin(self, directory: RunDirectory) -> None:
        directory.write_json("environment.json", environment(self.device) | self.engine.facts())
        directory.write_json("partition.json", self._partition_record())

    def _run(self, directory: RunDirectory, checkpoints: Checkpoints) -> Steps[Result]:
        progress, experiment = self.progress, self.experiment
        self.population.records.folder = directory.path
        channel = Channel(progress.traffic)
        for callback in self.callbacks:
            callback.on_start(experiment, directory.path, progress.next_round)
        if progress.next_round == 0 and (opening := (yield from self._opening(channel))):
            directory.append("rounds.jsonl", opening)
        last_saved, wait = time.monotonic(), self.how.checkpoint_seconds
        for round in range(progress.next_round, experiment.rounds):
            began = time.monotonic()
            self.seconds = {}
            clients, traffic = yield from self._round(round, channel)
            evaluation = yield from self._evaluate_if_due(round, directory)
            directory.append(
                "rounds.jsonl",
                {
                    "round": round,
                    "clients": clients,
                    "learning_rate": experiment.training.learning_rate_at(round),
                    "client_state": _columns(self.client_facts),
                    "traffic": traffic,
                    "traffic_total": vars(channel.total),
                    **({"evaluation": evaluation} if evaluation else {}),
                },
            )
            directory.append("timing.jsonl", {"round": round, **self.seconds})
            progress.next_round = round + 1
            progress.log_sizes = directory.log_sizes()
            if time.monotonic() - last_saved >= wait:
                began_saving = time.monotonic()
                self.engine.collect(self.population)
                checkpoints.save(progress, self.population.records, self.changed)
                self.changed.clear()
                last_saved = time.monotonic()
                if self.how.checkpoint_seconds:  # large models are written less often
                    wait = max(wait, (last_saved - began_saving) / CHECKPOINT_SHARE)
            accuracy = headline(evaluation)["test_accuracy"] if evaluation else None
            seconds = time.monotonic() - began
            for callback in self.callbacks:
                callback.on_round(RoundReport(experiment, round, accuracy, channel.total, seconds))
        return (yield from self._finish(directory, checkpoints))

    def _finish(self, directory: RunDirectory, checkpoints: Checkpoints) -> Steps[Result]:
        yield from self._save_models(directory)
        self.population.records.close()
        result = Result(directory.path)
        directory.write_json("summary.json", result.summarize())
        checkpoints.remove()  # nothing is left to resume
        for callback in self.callbacks:
            callback.on_end(result)
        return result

    def begin(self, channel: Channel) -> dict[str, Any] | None:
        """The server's first state; where the method has an initial set S(−1), what it sent."""
        return drive(self._opening(channel), self.engine)

    def play_round(self, round: int, channel: Channel) -> tuple[list[int], dict[str, int]]:
        """One communication round; returns who took part and what crossed."""
        return drive(self._round(round, channel), self.engine)

    def _opening(self, channel: Channel) -> Steps[dict[str, Any] | None]:
        self.progress.state = self.algorithm.start(self._server(-1))
        if type(self.algorithm).first_message is Algorithm.first_message:
            return None
        clients = self._select(-1)
        nothing = {client: Message() for client in clients}
        outcomes = yield self.population.call("first_message", nothing, -1)
        self._merge(-1, channel.up(_replies(outcomes)))
        traffic = vars(channel.total).copy()
        return {"round": -1, "clients": clients, "traffic": traffic, "traffic_total": traffic}

    def _round(self, round: int, channel: Channel) -> Steps[tuple[list[int], dict[str, int]]]:
        before = dataclasses.replace(channel.total)
        clients = self._everyone() if self.algorithm.trains_everyone() else self._select(round)
        server = self._server(round)
        with self._timed("broadcast"):
            messages = {
                client: self.algorithm.broadcast(server, self.progress.state, self._info(client))
                for client in clients
            }
            messages = dict(channel.down(messages))
        with self._timed("clients"):
            outcomes: Mapping[int, Outcome]
            outcomes = yield self.population.call("client_round", messages, round)
        for client, outcome in outcomes.items():
            if outcome.fault is not None:
                raise _diverged(round, outcome.fault, f"client {client}")
        with self._timed("merge"):
            self._merge(round, channel.up(_replies(outcomes)))
        _check_finite(round, {"the server": [*flatten(self.progress.state).items()]})
        self.engine.commit(self.population)
        self.changed.update(client for client, outcome in outcomes.items() if outcome.changed)
        self.client_facts = [outcome.facts for outcome in outcomes.values()]
        for client in clients:
            self.progress.trained[client] += 1
        after = vars(channel.total)
        return clients, {name: after[name] - earlier for name, earlier in vars(before).items()}

    def _merge(self, round: int, replies: Mapping[int, Message]) -> None:
        if not replies:  # nobody answered: the server knows what it knew
            return
        ordered = [Reply(self._info(client), replies[client]) for client in sorted(replies)]
        server = self._server(round)
        with torch_stream(self.experiment.seed, "server-module", round=round):
            self.progress.state = self.algorithm.merge(server, self.progress.state, ordered)

    def _evaluate_if_due(self, round: int, directory: RunDirectory) -> Steps[dict[str, Any]]:
        """Every client's numbers to the directory, and their summary by model kind."""
        done = round + 1
        if done % self.experiment.evaluate_every and done != self.experiment.rounds:
            return {}
        with self._timed("evaluate"):
            messages = self._evaluation_messages(round)
            columns = yield self.population.call("judge", messages, round)
        for column in columns.values():
            numbers = [(name, torch.tensor(values)) for name, values in column.items()]
            _check_finite(round, {"an evaluation": numbers})
        lists = {
            kind: {name: values.tolist() for name, values in column.items()}
            for kind, column in columns.items()
        }
        directory.append("clients.jsonl", {"round": round, **lists})
        drawn = np.array(self.progress.trained) > 0
        sizes = self.federation.train_sizes, self.federation.test_sizes
        return {kind: summarize(column, *sizes, drawn) for kind, column in columns.items()}

    def _evaluation_messages(self, round: int) -> dict[int, Message]:
        server = self._server(round)
        return {
            client: self.algorithm.evaluation_message(
                server, self.progress.state, self._info(client)
            )
            for client in self._everyone()
        }

    def _save_models(self, directory: RunDirectory) -> Steps[None]:
        """Every client's final model; what several clients share is written once."""
        folder = directory.path / "models"
        folder.mkdir(exist_ok=True)
        last = self.experiment.rounds - 1
        written: dict[bytes, str] = {}
        index: dict[str, dict[str, str]] = {}
        new: list[tuple[Path, bytes]] = []
        messages = list(self._evaluation_messages(last).items())
        for start in range(0, len(messages), MODELS_AT_ONCE):
            few = dict(messages[start : start + MODELS_AT_ONCE])
            made = yield self.population.call("models", few, last)
            for client, kind, content, digest in in_threads(_encoded, _named(made)):
                if digest not in written:
                    written[digest] = f"{kind}-{int(client):04d}.safetensors"
                    new.append((folder / written[digest], content))
                index.setdefault(client, {})[kind] = written[digest]
                if len(new) >= WRITERS:
                    _write_all(new)
        _write_all(new)
        directory.write_json(
            "models/index.json",
            {
                "input_shape": list(self.federation.input_shape),
                "classes": self.federation.samples.classes,
                "architectures": {
                    label: plain(architecture)
                    for label, architecture in self.population.by_label.items()
                },
                "clients": [
                    {"architecture": label, "models": index[str(client)]}
                    for client, label in enumerate(self.population.architectures)
                ],
            },
        )

    def _partition_record(self) -> dict[str, Any]:
        record = self.federation.record()
        for client, architecture in zip(
            record["clients"], self.population.architectures, strict=True
        ):
            client["architecture"] = architecture
        return record

    def _server(self, round: int) -> Server:
        return Server(
            self.experiment.seed,
            round,
            self._population,
            self.population.initial_weights,
            self.population.modules,
            self.population.public_x,
        )

    def _info(self, client: int) -> ClientInfo:
        return ClientInfo(client, self.population.architectures[client])

    def _everyone(self) -> list[int]:
        return list(range(self.experiment.clients))

    def _select(self, round: int) -> list[int]:
        return select_clients(
            self.federation.train_sizes,
            self.experiment.clients_per_round,
            self.experiment.selection == "by-size",
            self.experiment.seed,
            round,
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - began


def _named(models: Mapping[int, Mapping[str, Judged]]) -> Iterator[tuple[str, str, Judged]]:
    for client, by_kind in models.items():
        for kind, model in by_kind.items():
            yield str(client), kind, model


def _encoded(named: tuple[str, str, Judged]) -> tuple[str, str, bytes, bytes]:
    client, kind, model = named
    if isinstance(model, Weights):
        content = tensorfile.encode(model.params | model.buffers)
    else:
        content = tensorfile.encode({"class_prior_logits": model.logits})
    return client, kind, content, blake2b(content).digest()


def _write_all(files: list[tuple[Path, bytes]]) -> None:
    list(in_threads(lambda file: tensorfile.write_atomically(*file), files))
    files.clear()


def drive(steps: Steps[T], engine: Engine) -> T:
    """Carry one computation to its end."""
    results: Any = None
    while True:
        try:
            call = steps.send(results)
        except StopIteration as end:
            value: T = end.value
            return value
        (results,) = engine.call([call])


def _check_finite(round: int, tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> None:
    """``tensors`` by their owner."""
    broken = find_not_finite(tensors)
    if broken is not None:
        raise _diverged(round, broken[1], broken[0])


def _diverged(round: int, name: str, owner: str) -> Diverged:
    return Diverged(
        f"round {round}: '{name}' of {owner} is not finite; "
        "a smaller training.learning_rate may help"
    )


def _replies(outcomes: Mapping[int, Outcome]) -> dict[int, Message]:
    return {
        client: outcome.reply for client, outcome in outcomes.items() if outcome.reply is not None
    }


def _columns(facts: Sequence[Mapping[str, float]]) -> dict[str, list[float | None]]:
    """Clients' numbers by name, in the order of clients."""
    names = sorted({name for one in facts for name in one})
    return {name: [one.get(name) for one in facts] for name in names}
