"""Simulation: config → data and models → algorithm ⇄ channel ⇄ engine → run directory."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
import torch

from perfed.config import Comparison, Experiment
from perfed.core import tensorfile
from perfed.core.algorithm import ClientInfo, Predictor, Server
from perfed.core.channel import Channel
from perfed.core.declaration import Known
from perfed.core.errors import ConfigError, RunError
from perfed.core.hostile import honest_ones
from perfed.core.message import Message
from perfed.core.metrics import check_range
from perfed.core.notices import say_once
from perfed.core.pixels import numbers
from perfed.core.schema import plain, to_mapping
from perfed.core.selection import select_clients
from perfed.core.threads import WRITERS, cpu_threads, in_threads
from perfed.data.needs import needs_of
from perfed.engines import ClientRecord, ClientStore, Engine, Execution, Outcome, Population
from perfed.engines.base import STEPS
from perfed.engines.execution import fitting_threads
from perfed.engines.speaker import spent_steps
from perfed.models import parameter_count
from perfed.runs.coordinator import (
    Callback,
    Coordinator,
    Steps,
    check_finite,
    difference,
    diverged,
    drive,
    summaries,
)
from perfed.runs.directory import MANIFEST, RunDirectory, claimed_path, environment
from perfed.runs.result import Result
from perfed.runs.settings import accept_changes, text_of
from perfed.runs.stopping import Stop

log = logging.getLogger("perfed")
AUTOMATIC = Execution()
MODELS_AT_ONCE = 64  # are in memory while the final ones are written


def run(
    experiment: Experiment,
    directory: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    how: Execution = AUTOMATIC,
) -> Result:
    """Run an experiment in a new directory (``runs/<name>-<time>`` unless told otherwise)."""
    experiment = checked(experiment, Experiment, "perfed.run")
    simulation = Simulation(experiment, callbacks, how)
    path = Path(directory) if directory else claimed_path(experiment.name)
    return simulation.finish_in(RunDirectory.create(path))


def resume_run(
    directory: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    how: Execution = AUTOMATIC,
    accept_changes: bool = False,
) -> Result:
    """Continue a run from its newest checkpoint; a finished one is returned as it is."""
    opened = RunDirectory.open(Path(directory))
    if accept_changes and not opened.finished:
        _accept_changes(opened)
    begun = Result(directory)
    if opened.finished:
        return begun
    how = as_recorded(opened, how)
    return Simulation(begun.experiment, callbacks, how).finish_in(opened)


def _accept_changes(directory: RunDirectory) -> None:
    with directory.locked(), directory.reading():
        saved = (directory.path / MANIFEST).is_file()
        rounds_done = int(directory.read_json(MANIFEST)["next_round"]) if saved else 0
        changed = accept_changes(directory, rounds_done)
    if changed:
        log.warning("%s goes on with other settings: %s", directory.path, text_of(changed))


What = TypeVar("What")


def checked(value: Any, kind: type[What], function: str) -> What:
    """``value``, where it is of the kind that a function takes."""
    if isinstance(value, kind):
        return value
    hints = {Comparison: "perfed.compare takes it", Experiment: "perfed.run takes it"}
    hint = hints.get(type(value), "perfed.load reads one from a file")
    raise ConfigError(f"takes {kind.__name__}, not {type(value).__name__}: {hint}", function)


def as_recorded(directory: RunDirectory, how: Execution) -> Execution:
    """A run goes on in the numbers it began with, and by itself on the same engine: another one
    would change last bits."""
    if not (directory.path / "environment.json").is_file():  # killed before its first round
        return how
    recorded = directory.read_json("environment.json")
    here = str(recorded.get("device")).startswith(how.torch_device().type)
    if how.engine == "auto" and here and recorded.get("engine") in ("sequential", "stacked"):
        how = dataclasses.replace(how, engine=recorded["engine"])
    began: Any = recorded.get("precision", "float32")
    if how.precision not in ("auto", began):
        raise RunError(f"{directory.path} was begun in {began}: it cannot go on in {how.precision}")
    return dataclasses.replace(how, precision=began)


class Simulation(Coordinator):
    """One experiment whose clients are all here, on an engine."""

    def __init__(
        self,
        experiment: Experiment,
        callbacks: Iterable[Callback] = (),
        how: Execution = AUTOMATIC,
        engine: Engine | None = None,
    ) -> None:
        self.federation = experiment.federation()
        self.selected = _selected_a_round(experiment, self.federation.clients)
        super().__init__(
            experiment,
            callbacks,
            how.torch_device(),
            how.checkpoint_seconds,
            self.federation.clients,
        )
        self.how = how
        self._honest = honest_ones(self.federation.partition_facts, self.clients)[self.evaluated]
        self._check_somebody_is_honest()
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
            experiment.rounds,
            experiment.seed,
            self.device,
            ClientStore(self.device, how.store_bytes()),
            self._link,
            attack=experiment.hostile,
            privacy=experiment.privacy,
            participation=experiment.participation,
        )
        self._told_sizes = self._told()
        self.engine = engine or how.build_engine()
        self.population.engine = self.engine
        everyone = self.algorithm.trains_everyone()
        self.engine.expect(self.population, self.clients if everyone else self.selected)
        self._counts = dict(Counter(self.population.architectures))
        self.records = self.population.records
        self._private_steps: dict[int, int] = {}
        self._client_facts: Mapping[int, Mapping[str, float]] = {}
        self._dropped: list[int] = []

    def finish_in(self, directory: RunDirectory) -> Result:
        """Run to the end, or until Ctrl-C or another signal to stop."""
        stop = Stop()
        with directory.locked(), cpu_threads(fitting_threads(self.population)), stop.listening():
            try:
                return drive(self.steps(directory, stop), self.engine)
            finally:
                self.engine.close()
                directory.remove_leftovers()

    def _open(self, directory: RunDirectory) -> None:
        begun = (directory.path / MANIFEST).is_file()
        if not (directory.path / "partition.json").is_file() and not begun:
            how = self.engine.facts()
            directory.write_json("environment.json", environment(self.device) | how)
            directory.write_json("partition.json", self._partition_record())
        else:
            self._check_partition(directory.path, directory.read_json("partition.json"))
        self.population.records.folder = directory.path

    def _restore(self, records: Mapping[int, ClientRecord]) -> None:
        self.population.commit(records)
        self._private_steps = {k: spent_steps(record.kept) for k, record in records.items()}

    def _kept(self) -> Mapping[int, ClientRecord]:
        self.engine.collect(self.population)
        return self.records

    def _close(self, directory: RunDirectory) -> Steps[None]:
        if self.how.save_models:
            yield from self._save_models(directory)
        self.population.records.close()

    def begin(self, channel: Channel) -> dict[str, Any] | None:
        """The server's first state; where the method has an initial set S(−1), what it sent."""
        return drive(self._opening(channel), self.engine)

    def play_round(self, round: int, channel: Channel) -> tuple[list[int], dict[str, int]]:
        """One communication round; returns who took part and what crossed."""
        return drive(self._round(round, channel), self.engine)

    def _opening(self, channel: Channel) -> Steps[dict[str, Any] | None]:
        self.progress.state = self._started()
        if not self.algorithm.has_opening:
            return None
        clients = self.select(-1)
        nothing = {client: Message() for client in clients}
        (outcomes,) = yield [self.population.call("first_message", nothing, -1)]
        self._begin_round()
        admitted = self._admitted(-1, self._sent(-1, outcomes), channel)
        if not admitted:
            silent = (clients[0], "it says nothing, nor does any other that was selected first")
            client, reason = next(iter(self.refused.items()), silent)
            raise RunError(f"no first message is admitted; client {client}: {reason}")
        self.merge(-1, admitted)
        traffic = vars(channel.total).copy()
        return {"round": -1, "clients": clients, "traffic": traffic, "traffic_total": traffic}

    def _round(self, round: int, channel: Channel) -> Steps[tuple[list[int], dict[str, int]]]:
        before = dataclasses.replace(channel.total)
        everyone = self.algorithm.trains_everyone()
        selected = self.there(round).tolist() if everyone else self.select(round)
        self._dropped = self.experiment.participation.dropped(selected, self.experiment.seed, round)
        self._begin_round()
        with self._timed("broadcast"):
            messages = self._broadcast(round, selected, channel)
        clients = [client for client in selected if client not in self._dropped]
        outcomes: Mapping[int, Outcome] = {}
        with self._timed("clients"):
            if clients:  # of a round that all drop out of, the server learns nothing
                received = {client: messages[client] for client in clients}
                (outcomes,) = yield [self.population.call("client_round", received, round)]
        with self._timed("merge"):
            admitted = self._admitted(round, self._sent(round, outcomes), channel)
            self._warn_of_refusals(round)
            self.merge(round, admitted)
        if outcomes:
            self.engine.commit(self.population)
        self.changed.update(client for client, outcome in outcomes.items() if outcome.changed)
        self._client_facts = {client: self._facts_of(client, o) for client, o in outcomes.items()}
        self._note_training(clients)
        return clients, difference(channel.total, before)

    def _facts_of(self, client: int, outcome: Outcome) -> dict[str, float]:
        """What a round's line says of a client: of noised steps, what they cost so far."""
        facts = dict(outcome.facts)
        if self.population.privacy is not None:
            self._private_steps[client] = int(facts.pop(STEPS))
            facts["epsilon"] = self._epsilon(client)
        return facts

    def _epsilon(self, client: int) -> float:
        return self.population.epsilon(client, self._private_steps.get(client, 0))

    def _evaluate(self, round: int, directory: RunDirectory) -> Steps[dict[str, Any]]:
        with self._timed("evaluate"):
            messages = self.evaluation_messages(round)
            (columns,) = yield [self.population.call("evaluate", messages, round)]
        for column in columns.values():
            losses = [(n, torch.tensor(v)) for n, v in column.items() if n.endswith("_loss")]
            check_finite(round, {"an evaluation": losses})
            check_range(column)
        lists = {
            kind: {name: values.tolist() for name, values in column.items()}
            for kind, column in columns.items()
        }
        if self.experiment.privacy is not None:
            spent = [self._epsilon(client) for client in self.evaluated]
            for column in lists.values():
                column["epsilon"] = spent
        directory.append("clients.jsonl", {"round": round, **lists})
        train_sizes = self.federation.train_sizes[self.evaluated]
        weights = self._held_to_test()[self.evaluated]
        trained = np.array([self.progress.trained.get(client, 0) for client in self.evaluated])
        honest = self._honest
        of_honest = {
            kind: {name: values[honest] for name, values in column.items()}
            for kind, column in columns.items()
        }
        return summaries(of_honest, train_sizes[honest], weights[honest], trained[honest])

    def _check_somebody_is_honest(self) -> None:
        """Of those that are evaluated: means are of honest clients. A partition that leaves out
        small clients, and the draw of those that are evaluated, can leave hostile ones alone."""
        if self._honest.any():
            return
        if self.experiment.evaluate_clients:
            raise ConfigError(
                f"none of the {len(self.evaluated)} that are evaluated is honest, and means are of "
                "honest clients: must be more, or 0 for all",
                "evaluate_clients",
            )
        raise ConfigError(
            f"none of the {self.clients} clients that are left is honest: must be lower",
            "hostile.share",
        )

    def _held_to_test(self) -> np.ndarray:
        """How many samples each client has that its model is for: its test samples, or all it holds
        where it is evaluated on samples that are not its own."""
        if self.experiment.fresh_test or self.experiment.shared_test:
            return np.asarray(self.federation.partition_facts["sizes"])
        return self.federation.test_sizes

    def _save_models(self, directory: RunDirectory) -> Steps[None]:
        """The final model of every client that is evaluated; what several share is written once."""
        folder = directory.path / "models"
        folder.mkdir(exist_ok=True)
        last = self.experiment.rounds - 1
        written: dict[str, str] = {}
        index: dict[str, dict[str, str]] = {}
        new: list[tuple[Path, bytes]] = []
        messages = list(self.evaluation_messages(last).items())
        for start in range(0, len(messages), MODELS_AT_ONCE):
            few = dict(messages[start : start + MODELS_AT_ONCE])
            (made,) = yield [self.population.call("models", few, last)]
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
                "input_shape": list(self.population.inputs.shape),
                "vocabulary": self.population.inputs.vocabulary,
                "classes": self.federation.samples.classes,
                "needs": to_mapping(
                    needs_of(self.federation, self.population.inputs, int(self.evaluated[0]))
                ),
                "architectures": {
                    label: plain(architecture)
                    for label, architecture in self.population.by_label.items()
                },
                "networks": {name: plain(a) for name, a in self.population.extra.items()},
                "between": {
                    name: {
                        "architecture": plain(b.architecture),
                        "takes": b.takes,
                        "gives": b.gives,
                    }
                    for name, b in self.population.between.items()
                },
                "clients": [
                    {
                        "architecture": self.population.architectures[client],
                        "models": index[str(client)],
                    }
                    for client in self.evaluated
                ],
                **({"numbers": self.evaluated} if self.experiment.evaluate_clients else {}),
            },
        )

    def _sent(self, round: int, outcomes: Mapping[int, Outcome]) -> dict[int, Message]:
        """The replies that leave their clients. One that is not finite does not: its client is
        left out, as a site leaves itself out. The run ends where every reply is so, or a model, or
        a number that a client keeps."""
        for client, outcome in outcomes.items():
            odd = (name for name, number in outcome.facts.items() if not math.isfinite(number))
            kept = outcome.broken_model or next(odd, None)
            if kept is not None:
                raise diverged(round, kept, f"client {client}")
        replies = {k: outcome.reply for k, outcome in outcomes.items() if outcome.reply is not None}
        broken = {k: name for k in replies if (name := outcomes[k].broken_reply) is not None}
        if broken and len(broken) == len(replies):
            client, name = next(iter(broken.items()))
            raise diverged(round, name, f"client {client}")
        self.refused |= {k: f"{unquote(name)}: is not finite" for k, name in broken.items()}
        return {client: reply for client, reply in replies.items() if client not in broken}

    def _warn_of_refusals(self, round: int) -> None:
        """Here a refusal means that a client's training has diverged, or a mistake in the
        algorithm or in its declaration."""
        for client, reason in list(self.refused.items())[:1]:
            count = len(self.refused)
            log.warning("round %d: refused %d; client %d: %s", round, count, client, reason)

    def _facts(self, clients: list[int]) -> dict[str, Any]:
        """Small things that clients keep (their cluster, say), in the order of ``clients``."""
        facts = [self._client_facts[client] for client in clients]
        names = sorted({name for one in facts for name in one})
        return {
            "client_state": {name: [one.get(name) for one in facts] for name in names},
            **self._absence(clients),
            **self._privacy_facts(),
        }

    def _absence(self, clients: Iterable[int]) -> dict[str, list[int]]:
        """Who was selected and dropped out, and who made fewer steps."""
        experiment = self.experiment
        slow = experiment.participation.slow(clients, experiment.seed, self.progress.next_round)
        absence = {"dropped": self._dropped, "slow": slow}
        return {word: who for word, who in absence.items() if who}

    def _privacy_facts(self) -> dict[str, Any]:
        """What clients have spent, of those that are evaluated."""
        privacy = self.experiment.privacy
        if privacy is None:
            return {}
        spent = [self._epsilon(client) for client in self.evaluated]
        return {
            "privacy": {
                "epsilon": max(spent),
                "epsilon_mean": float(np.mean(spent)),
                "delta": privacy.delta,
                "spent_up": sum(map(self._has_spent_all, self.evaluated)),
            }
        }

    def _has_spent_all(self, client: int) -> bool:
        if self.population.privacy is None:
            return False
        steps = self._private_steps.get(client, 0)
        return not self.population.account(client).allows(steps, self.experiment.training.steps)

    def _check_partition(self, path: Path, recorded: dict[str, Any]) -> None:
        """The data and networks are those the run was begun with, as far as it says."""
        now = self._partition_record()
        changed = {key for key, value in recorded.items() if now.get(key) != value}
        if "data" in changed:
            raise RunError(f"{path}: the data is not what it was when the run was begun")
        if changed == {"architectures"}:
            raise RunError(f"{path}: the networks are not what they were when the run was begun")
        if changed:
            raise RunError(
                f"{path}: the data now gives another partition than the recorded "
                "one; the dataset or the version of perfed has changed"
            )

    def _partition_record(self) -> dict[str, Any]:
        some = self.experiment.evaluate_clients > 0
        record = self.federation.record(self.evaluated if some else None)
        record["architectures"] = {
            label: {"clients": count, "parameters": parameter_count(self.population.modules[label])}
            for label, count in self._counts.items()
        }
        for client, number in zip(record["clients"], self.evaluated, strict=True):
            client["architecture"] = self.population.architectures[number]
        return record

    def server(self, round: int) -> Server:
        return Server(
            self.experiment.seed,
            round,
            self._counts,
            self.population.initial_weights,
            self.population.modules,
            lambda: numbers(self.population.public_x),
            self.population.head,
        )

    def info(self, client: int) -> ClientInfo:
        architecture = self.population.architectures[client]
        return ClientInfo(client, architecture, int(self._told_sizes[client]))

    def _told(self) -> np.ndarray:
        """How many training samples each client says it has: all that the server knows of it."""
        if self.experiment.hostile is None and self.experiment.privacy is None:
            return self.federation.train_sizes
        return np.array([self.population.told_size(client) for client in self._everyone()])

    def known(self, client: int) -> Known:
        return self.population.known(client, self._broadcasts.get(client))

    def there(self, round: int) -> np.ndarray:
        """Who could be selected."""
        experiment = self.experiment
        return experiment.participation.there(self.clients, experiment.seed, round)

    def _there(self, round: int) -> int:
        return len(self.there(round))

    def select(self, round: int) -> list[int]:
        """Of those that are there; all of them where they are fewer than are to be selected."""
        there = self.there(round)
        if not len(there):
            return []
        everybody = len(there) == self.clients  # their sizes need not be copied, of millions
        places = select_clients(
            self._told_sizes if everybody else self._told_sizes[there],
            min(self.selected, len(there)),
            self.experiment.selection == "by-size",
            self.experiment.seed,
            round,
        )
        return [int(there[place]) for place in places]


def _selected_a_round(experiment: Experiment, clients: int) -> int:
    """How many of the clients that there are. A partition that leaves out small ones leaves others
    with every seed: where they are fewer than are to be selected, it is all of them."""
    if experiment.evaluate_clients > clients:
        raise ConfigError(
            f"{experiment.evaluate_clients} of {clients} clients that are left: must be at most "
            f"{clients}",
            "evaluate_clients",
        )
    if experiment.clients_per_round <= clients:
        return experiment.clients_per_round
    say_once(
        f"clients_per_round is {experiment.clients_per_round}, and {clients} clients are left: all "
        "of them are selected in each round"
    )
    try:
        experiment.algorithm.check(clients)
    except ConfigError as error:
        raise error.inside("algorithm") from None
    return clients


def _named(models: Mapping[int, Mapping[str, Predictor]]) -> Iterator[tuple[str, str, Predictor]]:
    for client, by_kind in models.items():
        for kind, model in by_kind.items():
            yield str(client), kind, model


def _encoded(named: tuple[str, str, Predictor]) -> tuple[str, str, bytes, str]:
    client, kind, model = named
    return client, kind, *tensorfile.sealed(model.tensors())


def _write_all(files: list[tuple[Path, bytes]]) -> None:
    list(in_threads(lambda file: tensorfile.write_atomically(*file), files))
    files.clear()
