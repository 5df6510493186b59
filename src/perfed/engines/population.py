"""The clients of one simulation: their data, their networks, and what they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.config import Training
from perfed.core.admission import check
from perfed.core.algorithm import Algorithm, Client, Judged
from perfed.core.declaration import Known
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.metrics import PARTS
from perfed.core.tree import Weights, find_not_finite
from perfed.core.wire import Link
from perfed.data import Federation
from perfed.engines.base import Call, ClientRecord, Engine, EngineClient, Job, Method
from perfed.engines.store import ClientStore
from perfed.models import Models, build_module, check_trains_on_one, initial_weights

Task = Callable[[Client, Message], Message | None]


class Population:
    """All clients of one simulation, whichever engine runs them."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        models: Models,
        training: Training,
        seed: int,
        device: torch.device,
        store: ClientStore | None = None,
        link: Link | None = None,
        trusts_server: bool = True,
    ) -> None:
        self.algorithm = algorithm
        self.federation = federation
        self.training = training
        self.seed = seed
        self.device = device
        self.link = link or Link(seed=seed)
        self._trusts_server = trusts_server
        self._messages = algorithm.messages()
        self.engine: Engine
        """Set by whoever runs these clients."""
        self.networks = models
        self._tasks: dict[str, tuple[Callable[[Any, Message], Any], str]] = {
            "first_message": (self._first_message, "module"),
            "client_round": (self._client_round, "module"),
            "models": (self._models, "judged-module"),
            "judge": (self._judge, "judged-module"),
        }
        dealt = models.deal(federation.train_sizes, seed)
        labels = {architecture: architecture.label() for architecture in dict.fromkeys(dealt)}
        self.architectures = [labels[architecture] for architecture in dealt]
        self._own_initial = models.initial == "own"
        self.by_label = {label: architecture for architecture, label in labels.items()}
        shape, self.classes = federation.input_shape, federation.samples.classes
        self.modules = {
            label: build_module(architecture, shape, self.classes).to(device)
            for architecture, label in labels.items()
        }
        self._check_batches()
        self._initial: dict[tuple[str, int], Weights] = {}
        self.records = ClientStore(device) if store is None else store
        self.pending: dict[int, ClientRecord] = {}
        """What a round has changed, until it is whole."""

    def _check_batches(self) -> None:
        training = self.training
        sizes = {"training.batch_size": training.batch_size}
        if self.algorithm.trains_on_public_set:
            sizes["training.public_batch_size"] = training.public_batch_size
        for where, size in sizes.items():
            for label, module in self.modules.items() if size == 1 else ():
                check_trains_on_one(label, module, self.federation.input_shape, where)

    # Samples go to the device when they are first used: where clients live elsewhere, never.

    @cached_property
    def x(self) -> Tensor:
        return self._numbers(self.federation.samples.x)

    @cached_property
    def y(self) -> Tensor:
        return torch.as_tensor(self.federation.samples.y, device=self.device)

    @cached_property
    def public_x(self) -> Tensor:
        return self._numbers(self.federation.samples.public_x)

    def _numbers(self, values: np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.get_default_dtype(), device=self.device)

    def call(self, method: Method, messages: Mapping[int, Message], round: int) -> Call:
        return Call(self, method, messages, round)

    def jobs(self, call: Call) -> list[Job]:
        """One job for each message."""
        task, purpose = self._tasks[call.method]
        return self.jobs_of(task, call.messages, call.round, purpose)

    def jobs_of(
        self,
        task: Callable[[Any, Message], Any],
        messages: Mapping[int, Message],
        round: int,
        purpose: str = "module",
    ) -> list[Job]:
        jobs = []
        for number, message in messages.items():
            client = self._client(number, round)
            jobs.append(Job(client, partial(task, client, message), purpose))
        return jobs

    def commit(self, records: Mapping[int, ClientRecord]) -> None:
        self.records.update(records)

    def models(self, client: int, message: Message, round: int) -> dict[str, Judged]:
        """The models of ``client`` that the algorithm wants judged."""
        (models,) = self.engine.perform([self.call("models", {client: message}, round)])
        judged: dict[str, Judged] = models[client]
        return judged

    def evaluate(
        self, messages: Mapping[int, Message], round: int
    ) -> dict[str, dict[str, np.ndarray]]:
        """Per model kind, one number per client: ``{"personal": {"test_accuracy": …}}``."""
        columns: dict[str, dict[str, np.ndarray]]
        (columns,) = self.engine.perform([self.call("judge", messages, round)])
        return columns

    # The client's half of the wire is around what the algorithm does there.

    def _first_message(self, client: EngineClient, message: Message) -> Message | None:
        if not self._trusts_server:
            check(message, {}, self.known(client.id))
        first = self.algorithm.first_message(client)
        return None if first is None else self._sent(client, first, "first_message")

    def _client_round(self, client: EngineClient, message: Message) -> Message:
        state, declared = client.kept.get("link", {}), self._messages.down
        received, kept = self.link.receive(
            message, client.id, client.round, "down", state, declared
        )
        if not self._trusts_server:
            check(received, declared, self.known(client.id))
        if kept is not state:
            client.kept["link"] = kept
        return self._sent(client, self.algorithm.client_round(client, received), "client_round")

    def _sent(self, client: EngineClient, message: Any, method: str) -> Message:
        if not isinstance(message, Message):
            name, kind = self.algorithm.registered_name, type(message).__name__
            raise ConfigError(f"{method} of '{name}' returned {kind}: must be a Message")
        if self.link.stages and find_not_finite({0: [*message.arrays.items()]}):
            return message  # as it is: whoever gets the outcome sees the fault
        state = client.kept.get("link", {})
        sent, kept = self.link.send(message, client.id, client.round, "up", state)
        if kept is not state:
            client.kept["link"] = kept
        return sent

    def _models(self, client: EngineClient, message: Message) -> dict[str, Judged]:
        declared = self._messages.evaluation
        received, _ = self.link.receive(
            message, client.id, client.round, "evaluation", {}, declared
        )
        if not self._trusts_server:
            check(received, declared, self.known(client.id))
        return self.algorithm.models(client, received)

    def known(self, client: int, received: Message | None = None) -> Known:
        """By what a client's messages are measured."""
        sizes = {"P": len(self.federation.samples.public_x), "N": self.classes}
        return Known(
            sizes,
            self.train_size(client),
            lambda network: self.initial_weights(network or self.architectures[client]),
            received=Message() if received is None else received,
        )

    def _judge(self, client: EngineClient, message: Message) -> dict[str, dict[str, Tensor]]:
        """The numbers of one client, by model kind."""
        models = self._models(client, message)
        places = [self.positions(client.id, part) for part in PARTS]
        labels = [self.y[where] for where in places]
        judged: dict[str, dict[str, Tensor]] = {}
        for kind, model in models.items():
            logits = client.logits(model, torch.cat(places))
            judged[kind] = {}
            for part, y, z in zip(
                PARTS, labels, torch.split(logits, [*map(len, places)]), strict=True
            ):
                judged[kind][f"{part}_accuracy"] = (z.argmax(1) == y).double().mean()
                judged[kind][f"{part}_loss"] = cross_entropy(z, y).double()
        return judged

    def record(self, client: int) -> ClientRecord:
        return self.records.get(client) or ClientRecord(self._first_weights(client))

    def _client(self, client: int, round: int) -> EngineClient:
        return EngineClient(self, client, round)

    def _first_weights(self, client: int) -> Weights:
        if self._own_initial:
            return self._draw_weights(self.architectures[client], client=client)
        return self.initial_weights(self.architectures[client])

    def initial_weights(self, architecture: str, number: int = 0) -> Weights:
        """The architecture's common initial weights; further ones for methods that need several."""
        key = (architecture, number)
        if key not in self._initial:
            self._initial[key] = self._draw_weights(architecture, number=number)
        return self._initial[key]

    def _draw_weights(self, architecture: str, *, client: int = -1, number: int = 0) -> Weights:
        drawn = initial_weights(
            self.by_label[architecture],
            self.federation.input_shape,
            self.classes,
            self.seed,
            client,
            number,
        )
        weights = with_public_statistics(drawn, self.algorithm, self.training).clone()
        return Weights(*({n: t.to(self.device) for n, t in part.items()} for part in weights))

    def positions(self, client: int, part: str) -> Tensor:
        """Where a client's ``train``, ``validation`` or ``test`` samples are."""
        return torch.as_tensor(getattr(self.federation.splits[client], part), device=self.device)

    def train_size(self, client: int) -> int:
        return len(self.federation.splits[client].train)


def with_public_statistics(weights: Weights, algorithm: Algorithm, training: Training) -> Weights:
    """With BatchNorm statistics of public batches, where those have their own: as yet the same."""
    separate = algorithm.trains_on_public_set and training.public_batchnorm == "separate"
    return weights._replace(public_buffers=weights.buffers if separate else {})


def changed_records(jobs: Sequence[Job]) -> dict[int, ClientRecord]:
    """What those clients now hold that have something new to keep."""
    return {job.client.id: job.client.record() for job in jobs if job.client.changed()}
