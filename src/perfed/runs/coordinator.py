"""The server's side of a run: who takes part, what is sent, what becomes of what comes back, and
what is written down. Where the clients are, in this process or at sites of their own, is said by
:class:`~perfed.runs.simulation.Simulation` and :mod:`perfed.flower.coordinator`."""

from __future__ import annotations

import dataclasses
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch

from perfed.config import Experiment
from perfed.core.admission import refusals
from perfed.core.algorithm import Algorithm, ClientInfo, Reply, Server
from perfed.core.channel import Channel, Traffic
from perfed.core.declaration import Known
from perfed.core.errors import ConfigError, Diverged, Refused, RunError
from perfed.core.message import Message
from perfed.core.metrics import Columns, load_metrics, summarize
from perfed.core.own_code import running, wrong_return
from perfed.core.selection import counted, evaluated_clients
from perfed.core.streams import torch_stream
from perfed.core.tree import Tree, find_not_finite, flatten
from perfed.core.wire import Link
from perfed.engines import ClientRecord
from perfed.runs.checkpoint import Checkpoints, Progress
from perfed.runs.directory import FAILED, MANIFEST, RunDirectory, say_other_versions
from perfed.runs.result import Result, headline
from perfed.runs.settings import changes, read_experiment, refuse_changes, text_of
from perfed.runs.stopping import Stop, Stopped

CHECKPOINT_SHARE = 0.05  # of a run's time, at most, is spent writing checkpoints
T = TypeVar("T")
Steps = Generator[list[Any], list[Any], T]
"""A computation that hands out what clients are to do, and goes on when it gets what that gave."""


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """What a callback learns after each round."""

    experiment: Experiment
    round: int
    accuracy: float | None
    """Mean test accuracy, where this round was evaluated."""
    traffic: Traffic
    seconds: float
    evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The round's averages by model kind, where it was evaluated."""
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Who took no part and why, where clients are sites."""


class Callback:
    """Something to do as a run goes on; override what is needed."""

    def on_start(self, experiment: Experiment, directory: Path, first_round: int) -> None: ...

    def on_round(self, report: RoundReport) -> None: ...

    def on_end(self, result: Result) -> None: ...

    def on_failure(self, experiment: Experiment, error: Diverged) -> None: ...


class Performer(Protocol):
    """Whoever does jobs: an engine, or the sites of a federation."""

    def perform(self, jobs: Sequence[Any]) -> list[Any]:
        """What each job returned."""


class Coordinator(ABC):
    """One experiment, from its first round to its last."""

    def __init__(
        self,
        experiment: Experiment,
        callbacks: Iterable[Callback],
        device: torch.device,
        checkpoint_seconds: float,
        clients: int,
    ) -> None:
        load_metrics(experiment.metrics)
        self.experiment = experiment
        self.algorithm: Algorithm = experiment.algorithm
        self.callbacks = list(callbacks)
        self.device = device
        self._checkpoint_seconds = checkpoint_seconds
        self.clients = clients
        """How many there are: fewer than the experiment's where its partition leaves some out."""
        self.progress = Progress(clients=clients)
        self.records: Mapping[int, ClientRecord] = {}
        """What clients keep, where it is kept here."""
        self.changed: set[int] = set()
        """Whose records differ from the newest checkpoint's."""
        self.seconds: dict[str, float] = {}
        self._described: dict[str, Any] = {}
        self._messages = self.algorithm.messages()
        self._link = Link(experiment.wire, experiment.seed)
        self.refused: dict[int, str] = {}
        """Whose messages of this round were not admitted, and why."""
        self._broadcasts: dict[int, Message] = {}
        """What clients were sent in this round, as the algorithm wrote it."""
        self._next_links: dict[int, Tree] = {}
        """The state of the server's end once the client's answer is admitted."""
        self._evaluation_channel = Channel()
        self.evaluated = evaluated_clients(clients, experiment.evaluate_clients, experiment.seed)
        """Whose numbers and models are written down."""

    # What differs with the place of the clients.

    @abstractmethod
    def _open(self, directory: RunDirectory) -> None:
        """Write down where the numbers of a new run come from, or check it against a begun one."""

    def _restore(self, records: Mapping[int, ClientRecord]) -> None:
        """Take back what a checkpoint holds of the clients."""
        self.records = records

    @abstractmethod
    def server(self, round: int) -> Server: ...

    @abstractmethod
    def info(self, client: int) -> ClientInfo: ...

    @abstractmethod
    def known(self, client: int) -> Known:
        """By what a client's messages are measured."""

    @abstractmethod
    def _opening(self, channel: Channel) -> Steps[dict[str, Any] | None]:
        """The server's first state; where the method has an initial set S(−1), what it sent."""

    @abstractmethod
    def _round(self, round: int, channel: Channel) -> Steps[tuple[list[int], dict[str, int]]]:
        """One communication round: who took part and what crossed."""

    @abstractmethod
    def _evaluate(self, round: int, directory: RunDirectory) -> Steps[dict[str, Any]]:
        """Every client's numbers to the directory, and their summary by model kind."""

    def _wanted_states(self, rounds: list[int]) -> Collection[int]:
        """Of the rounds after which there is a state of the server, those whose state is kept
        beside the newest."""
        return ()

    def _kept(self) -> Mapping[int, ClientRecord]:
        """``records``, up to date."""
        return self.records

    def _facts(self, clients: list[int]) -> dict[str, Any]:
        """What else a round's line says."""
        return {}

    def _close(self, directory: RunDirectory) -> Steps[None]:
        """What remains to be written after the last round."""
        yield from ()

    # What does not.

    def steps(self, directory: RunDirectory, stop: Stop | None = None) -> Steps[Result]:
        """The whole run in a locked directory, from its start or from its newest checkpoint; as
        long as nobody asks it to stop. A run that has ended stays as it is."""
        directory.remove_leftovers()
        self._check_settings(directory)
        if directory.finished:  # by another process, since it was last looked at
            return Result(directory.path)
        if directory.lacks_summary:
            return self._summarized(directory)
        if directory.failure:
            raise Diverged(
                f"{directory.path} diverged, and would again; begin a new run with other "
                f"settings: {directory.failure}"
            )
        checkpoints = Checkpoints(directory, self._wanted_states)
        with directory.reading():
            self._open(directory)
            say_other_versions(directory)
            saved = checkpoints.load(self.device)
        if saved is not None:
            self._check_progress(directory, saved[0])
        directory.cut_logs(*((saved[0].log_sizes, saved[0].log_sums) if saved else ({}, {})))
        if saved is not None:
            self._check_log(directory, saved[0])
            self.progress, records = saved
            self._restore(records)
        try:
            return (yield from self._run(directory, checkpoints, stop or Stop()))
        except Diverged as error:
            directory.write_json(FAILED, {"error": str(error)})
            for callback in self.callbacks:
                callback.on_failure(self.experiment, error)
            raise

    def _check_settings(self, directory: RunDirectory) -> None:
        """They are those the run was begun with; where it begins now, they are recorded."""
        if not (directory.path / "config.yaml").is_file():
            directory.write_yaml("config.yaml", self.experiment.to_mapping())
        directory.begin_checksums(self.experiment.to_mapping())
        there = read_experiment(directory.path)
        if changed := changes(there, self.experiment):
            raise RunError(
                f"{directory.path} was begun with other settings: {text_of(changed)}; choose "
                "another folder"
            )
        refuse_changes(directory, self.experiment)

    def _check_progress(self, directory: RunDirectory, saved: Progress) -> None:
        """A checkpoint fits the settings."""
        path = directory.path / MANIFEST
        if saved.next_round > self.experiment.rounds:
            raise RunError(
                f"{path} says that {saved.next_round} rounds are done, of {self.experiment.rounds}"
            )
        if saved.clients != self.clients:
            raise RunError(f"{path} knows {saved.clients} clients, of {self.clients}")

    def _check_log(self, directory: RunDirectory, saved: Progress) -> None:
        logged = [line["round"] for line in directory.lines("rounds.jsonl") if line["round"] >= 0]
        if logged != list(range(saved.next_round)):
            log = directory.path / "rounds.jsonl"
            raise RunError(f"{log} lacks a line for some of the {saved.next_round} rounds done")

    def _run(self, directory: RunDirectory, checkpoints: Checkpoints, stop: Stop) -> Steps[Result]:
        progress, experiment = self.progress, self.experiment
        channel = Channel(progress.traffic)
        for callback in self.callbacks:
            callback.on_start(experiment, directory.path, progress.next_round)
        last_saved, wait = time.monotonic(), self._checkpoint_seconds
        if not progress.opened:
            if opening := (yield from self._opening(channel)):
                facts = self._refusal_facts() | self._server_facts()
                directory.append("rounds.jsonl", opening | facts)
            progress.opened = True
            progress.log_sizes, progress.log_sums = directory.log_sizes(), directory.log_sums()
            if not wait:  # clients elsewhere do not go back to the opening once they have trained
                checkpoints.save(progress, self.records, self.changed)
        for round in range(progress.next_round, experiment.rounds):
            began = time.monotonic()
            self.seconds = {}
            kept = _as_it_is(progress)
            try:
                clients, traffic = yield from self._round(round, channel)
            except ConfigError as error:  # a mistake in the algorithm, which can be mended
                if not round:
                    raise
                checkpoints.save(kept, self._kept(), self.changed)
                raise RunError(f"round {round}: {error}; the rounds before it are kept") from error
            evaluation = {}
            self._evaluation_channel = Channel()
            if (round + 1) % experiment.evaluate_every == 0 or round + 1 == experiment.rounds:
                evaluation = yield from self._evaluate(round, directory)
            facts = self._facts(clients)
            directory.append(
                "rounds.jsonl",
                {
                    "round": round,
                    "clients": clients,
                    "learning_rate": experiment.training.learning_rate_at(round, experiment.rounds),
                    **facts,
                    **self._refusal_facts(),
                    **self._server_facts(),
                    "traffic": traffic,
                    "traffic_total": vars(channel.total),
                    **(self._evaluated(evaluation) if evaluation else {}),
                },
            )
            directory.append("timing.jsonl", {"round": round, **self.seconds})
            progress.next_round = round + 1
            progress.log_sizes, progress.log_sums = directory.log_sizes(), directory.log_sums()
            stopping = stop.asked
            if stopping or time.monotonic() - last_saved >= wait:
                began_saving = time.monotonic()
                checkpoints.save(progress, self._kept(), self.changed)
                self.changed.clear()
                last_saved = time.monotonic()
                if self._checkpoint_seconds:  # large models are written less often
                    wait = max(wait, (last_saved - began_saving) / CHECKPOINT_SHARE)
            accuracy = headline(evaluation)["test_accuracy"] if evaluation else None
            seconds = time.monotonic() - began
            absent = facts.get("absent", {})
            report = RoundReport(
                experiment, round, accuracy, channel.total, seconds, evaluation, absent
            )
            for callback in self.callbacks:
                callback.on_round(report)
            if stopping:
                raise Stopped(stop.number)
        return (yield from self._finish(directory, checkpoints))

    def _finish(self, directory: RunDirectory, checkpoints: Checkpoints) -> Steps[Result]:
        yield from self._close(directory)
        directory.check_logs()
        directory.end_checksums()
        result = self._summarized(directory)
        checkpoints.remove()  # nothing is left to resume
        for callback in self.callbacks:
            callback.on_end(result)
        return result

    def _summarized(self, directory: RunDirectory) -> Result:
        result = Result(directory.path)
        directory.write_json("summary.json", result.summarize())
        return result

    # The server's half of the wire.

    def _begin_round(self) -> None:
        self.refused, self._broadcasts, self._next_links = {}, {}, {}

    def _broadcast(
        self, round: int, clients: Iterable[int], channel: Channel
    ) -> dict[int, Message]:
        """What crosses to each client. Sent twice in a round, it is twice the same."""
        server = self.server(round)
        with running(self.algorithm, "broadcast"):
            written = {
                client: self.algorithm.broadcast(server, self.progress.state, self.info(client))
                for client in clients
            }
        self._check_messages("broadcast", written)
        sent = {}
        for client, message in written.items():
            state = self.progress.link.get(str(client), {})
            sent[client], self._next_links[client] = self._link.send(
                message, client, round, "down", state, self._messages.down, self.known(client)
            )
        self._broadcasts |= written
        channel.down(written, sent)
        return sent

    def _admitted(
        self, round: int, sent: Mapping[int, Message], channel: Channel
    ) -> dict[int, Message]:
        """What clients wrote, where it can be read and fits what is declared; of the others,
        :attr:`refused` says why not."""
        declared, refused = self._messages.up, dict[int, str]()
        written: dict[int, Message] = {}
        states: dict[int, Tree] = {}
        for client, message in sent.items():
            state = self._next_links.get(client, {})
            try:
                written[client], states[client] = self._link.receive(
                    message, client, round, "up", state, declared, self.known(client)
                )
            except Refused as error:
                refused[client] = str(error)
        channel.up(written, sent)
        refused |= refusals(written, declared, self.known)
        admitted = {client: m for client, m in written.items() if client not in refused}
        moved = {str(client): states[client] for client in admitted if states[client]}
        if moved:
            self.progress.link = self.progress.link | moved
        self.refused |= refused
        return admitted

    def _refusal_facts(self) -> dict[str, Any]:
        """For the round's line: whose message was not admitted, and why."""
        refused = {str(client): self.refused[client] for client in sorted(self.refused)}
        return {"refused": refused} if refused else {}

    def evaluation_messages(
        self, round: int, clients: Iterable[int] | None = None
    ) -> dict[int, Message]:
        """What crosses to all clients that are evaluated, unless told to whom; counted apart from
        a round's."""
        server = self.server(round)
        with running(self.algorithm, "evaluation_message"):
            written = {
                client: self.algorithm.evaluation_message(
                    server, self.progress.state, self.info(client)
                )
                for client in (self.evaluated if clients is None else clients)
            }
        self._check_messages("evaluation_message", written)
        declared = self._messages.evaluation
        sent = {
            client: self._link.send(
                message, client, round, "evaluation", {}, declared, self.known(client)
            )[0]
            for client, message in written.items()
        }
        self._evaluation_channel.down(written, sent)
        return sent

    def _check_messages(self, hook: str, written: Mapping[int, Any]) -> None:
        for message in written.values():
            if not isinstance(message, Message):
                raise wrong_return(self.algorithm, hook, message)

    def _evaluated(self, evaluation: Mapping[str, Any]) -> dict[str, Any]:
        crossed = vars(self._evaluation_channel.total)
        return {"evaluation_traffic": crossed, "evaluation": evaluation}

    def merge(self, round: int, replies: Mapping[int, Message]) -> None:
        self._described = {}
        if not replies:  # nobody answered: the server knows what it knew
            return
        server = self.server(round)
        there = self._there(round)
        ordered = [self._reply(client, replies[client], there) for client in sorted(replies)]
        before, link = self.progress.state, self.progress.link
        gathered, link = self._link.gather(
            ordered, round, link, self._messages.up, self.algorithm.merges_by_mean
        )
        stream = torch_stream(self.experiment.seed, "server-module", round=round)
        with stream, running(self.algorithm, "merge"):
            state = self.algorithm.merge(server, before, gathered)
        self.progress.state = self._checked_state("merge", state)
        self.progress.link = link
        check_finite(round, {"the server": [*flatten(state).items()]})  # else it describes nothing
        self._describe(before, state, gathered)

    def _describe(self, before: Tree, state: Tree, replies: Sequence[Reply]) -> None:
        """For the round's line: what came of these replies."""
        with running(self.algorithm, "describe"):
            self._described = self.algorithm.describe(before, state)
            json.dumps(self._described, allow_nan=False)  # as it will be written

    def _there(self, round: int) -> int:
        """How many clients could be selected."""
        return sum(self.server(round).architectures.values())

    def _reply(self, client: int, message: Message, there: int) -> Reply:
        """With what it counts where models are averaged."""
        info, experiment = self.info(client), self.experiment
        once = experiment.averaging == "size-once"
        everyone = self.algorithm.trains_everyone()
        drawn = there if everyone else experiment.clients_per_round
        selected_by_size = experiment.selection == "by-size"
        weight = counted(info.samples, once and selected_by_size, drawn, there)
        return Reply(info, message, weight)

    def _started(self) -> Tree:
        """The server's state before anything has crossed."""
        with running(self.algorithm, "start"):
            state = self.algorithm.start(self.server(-1))
        return self._checked_state("start", state)

    def _checked_state(self, hook: str, state: Any) -> Tree:
        if not isinstance(state, dict):
            raise wrong_return(self.algorithm, hook, state)
        flatten(state)  # raises where it holds anything but tensors
        return state

    def _server_facts(self) -> dict[str, Any]:
        """What the algorithm says of the newest merge."""
        return {"server_state": self._described} if self._described else {}

    def _everyone(self) -> list[int]:
        return list(range(self.clients))

    def _note_training(self, clients: Iterable[int]) -> None:
        trained = self.progress.trained
        trained.update({client: trained.get(client, 0) + 1 for client in clients})

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - began


def summaries(
    columns: Mapping[str, Columns],
    train_sizes: np.ndarray,
    weights: np.ndarray,
    trained: Sequence[int] | np.ndarray,
) -> dict[str, Any]:
    """A round's averages by model kind; ``trained`` is in how many rounds each client was."""
    selected = np.array(trained) > 0
    return {k: summarize(column, train_sizes, weights, selected) for k, column in columns.items()}


def difference(after: Traffic, before: Traffic) -> dict[str, int]:
    """What crossed in between."""
    return {name: getattr(after, name) - earlier for name, earlier in vars(before).items()}


def _as_it_is(progress: Progress) -> Progress:
    """What a round does to ``progress`` does not change it: trees are never written to."""
    traffic, trained = dataclasses.replace(progress.traffic), dict(progress.trained)
    return dataclasses.replace(progress, traffic=traffic, trained=trained)


def drive(steps: Steps[T], performer: Performer) -> T:
    """Carry one computation to its end."""
    results: Any = None
    error: ConfigError | None = None
    while True:
        try:
            jobs = steps.send(results) if error is None else steps.throw(error)
        except StopIteration as end:
            value: T = end.value
            return value
        try:
            results, error = performer.perform(jobs), None
        except ConfigError as mistake:  # in an algorithm: what was done before can be kept
            error = mistake


def check_finite(round: int, tensors: Mapping[str, Sequence[tuple[str, torch.Tensor]]]) -> None:
    """``tensors`` by their owner."""
    broken = find_not_finite(tensors)
    if broken is not None:
        raise diverged(round, broken[1], broken[0])


def diverged(round: int, name: str, owner: str) -> Diverged:
    what = f"'{name}' of {owner} is not finite"
    if round < 0:
        return Diverged(f"{what} before any training: the network gives no numbers")
    return Diverged(f"round {round}: {what}; a smaller training.learning_rate may help")
