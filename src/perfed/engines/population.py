"""The clients of one simulation: their data, their networks, and what they keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.config import Training
from perfed.core.algorithm import Algorithm, Client, Judged
from perfed.core.message import Message
from perfed.core.metrics import PARTS
from perfed.core.tree import Weights
from perfed.data import Federation
from perfed.engines.base import ClientRecord, Engine, EngineClient, Job, Logits
from perfed.engines.store import ClientStore
from perfed.models import Models, build_module, initial_weights

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
    ) -> None:
        self.algorithm = algorithm
        self.federation = federation
        self.training = training
        self.seed = seed
        self.device = device
        self.engine: Engine
        """Set by whoever runs these clients."""
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
        self._initial: dict[tuple[str, int], Weights] = {}
        dtype = torch.get_default_dtype()
        samples = federation.samples
        self.x = torch.as_tensor(samples.x, dtype=dtype, device=device)
        self.y = torch.as_tensor(samples.y, device=device)
        self.public_x = torch.as_tensor(samples.public_x, dtype=dtype, device=device)
        self.records = ClientStore(device) if store is None else store

    def run(
        self, task: Task, messages: Mapping[int, Message], round: int
    ) -> tuple[dict[int, Message], dict[int, ClientRecord]]:
        """Each client's reply to its message, and what those that changed then hold.

        The records are not stored yet: :meth:`commit` does that, once the round is whole.
        """
        jobs = self.jobs(task, messages, round)
        return outcome(jobs, self.engine.perform(jobs))

    def jobs(self, task: Task, messages: Mapping[int, Message], round: int) -> list[Job]:
        """One job for each message."""
        return self._jobs(task, messages, round, "module")

    def _jobs(
        self,
        task: Callable[[Any, Message], Any],
        messages: Mapping[int, Message],
        round: int,
        purpose: str,
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
        models: dict[str, Judged]
        (models,) = self.engine.perform(self.model_jobs({client: message}, round))
        return models

    def model_jobs(self, messages: Mapping[int, Message], round: int) -> list[Job]:
        return self._jobs(self.algorithm.models, messages, round, "judged-module")

    def evaluate(
        self, messages: Mapping[int, Message], round: int
    ) -> dict[str, dict[str, np.ndarray]]:
        """Per model kind, one number per client: ``{"personal": {"test_accuracy": …}}``."""
        jobs = self.evaluation_jobs(messages, round)
        return evaluation(self.engine.perform(jobs))

    def evaluation_jobs(self, messages: Mapping[int, Message], round: int) -> list[Job]:
        return self._jobs(self._judge, messages, round, "judged-module")

    def _judge(self, client: EngineClient, message: Message) -> dict[str, dict[str, Tensor]]:
        """The numbers of one client, by model kind."""
        models = self.algorithm.models(client, message)
        places = [self.positions(client.id, part) for part in PARTS]
        labels = [self.y[where] for where in places]
        judged: dict[str, dict[str, Tensor]] = {}
        for kind, model in models.items():
            if isinstance(model, Weights):
                logits = client.ask(Logits(client, model, torch.cat(places)))
            else:
                logits = model.logits.expand(sum(map(len, places)), -1)
            judged[kind] = {}
            for part, y, z in zip(PARTS, labels, logits.split([*map(len, places)]), strict=True):
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
        params, buffers, _ = initial_weights(
            self.by_label[architecture],
            self.federation.input_shape,
            self.classes,
            self.seed,
            client,
            number,
        )
        separate = (
            self.algorithm.trains_on_public_set and self.training.public_batchnorm == "separate"
        )
        weights = Weights(params, buffers, buffers if separate else {}).clone()
        return Weights(*({n: t.to(self.device) for n, t in part.items()} for part in weights))

    def positions(self, client: int, part: str) -> Tensor:
        """Where a client's ``train``, ``validation`` or ``test`` samples are."""
        return torch.as_tensor(getattr(self.federation.splits[client], part), device=self.device)

    def train_size(self, client: int) -> int:
        return len(self.federation.splits[client].train)


def outcome(
    jobs: Sequence[Job], results: Sequence[Message | None]
) -> tuple[dict[int, Message], dict[int, ClientRecord]]:
    """Replies, and the records of the clients that changed."""
    replies = {
        job.client.id: result
        for job, result in zip(jobs, results, strict=True)
        if result is not None
    }
    records = {
        job.client.id: ClientRecord(job.client.weights, job.client.state)
        for job in jobs
        if job.client.changed()
    }
    return replies, records


def evaluation(
    judged: Sequence[Mapping[str, Mapping[str, Tensor]]],
) -> dict[str, dict[str, np.ndarray]]:
    """One column for each number of each model kind, from the device in one piece."""
    names = [(kind, name) for kind, numbers in judged[0].items() for name in numbers]
    table = torch.stack([client[kind][name] for kind, name in names for client in judged])
    columns: dict[str, dict[str, np.ndarray]] = {}
    for (kind, name), column in zip(
        names, table.reshape(len(names), len(judged)).cpu().numpy(), strict=True
    ):
        columns.setdefault(kind, {})[name] = column
    return columns
