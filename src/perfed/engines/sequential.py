"""The reference engine: one client after another, as plainly as possible.

Every other engine is tested against this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from perfed.config import Training
from perfed.core.algorithm import (
    Algorithm,
    Client,
    Judged,
    Network,
    Objective,
    Private,
    Public,
)
from perfed.core.message import Message
from perfed.core.metrics import PARTS
from perfed.core.streams import stream_key, uniform_indices
from perfed.core.tree import Tree, Weights
from perfed.data import Federation
from perfed.models import Architecture, Models, build_module, initial_weights

EVALUATION_BATCH = 2048


@dataclass
class ClientRecord:
    """What stays with a client from one draw to the next."""

    weights: Weights
    state: Tree = field(default_factory=dict)


Task = Callable[[Client, Message], Message | None]


class SequentialEngine:
    """Runs what an algorithm says on the clients of a federation, one at a time."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        models: Models,
        training: Training,
        seed: int,
        device: torch.device,
    ) -> None:
        self.algorithm = algorithm
        self.federation = federation
        self.training = training
        self.seed = seed
        self.device = device
        self.dealt = models.deal(federation.train_sizes, seed)
        labels = {architecture: architecture.label() for architecture in dict.fromkeys(self.dealt)}
        self.architectures = [labels[architecture] for architecture in self.dealt]
        self._own_initial = models.initial == "own"
        shape, self.classes = federation.input_shape, federation.samples.classes
        self.modules: dict[str, nn.Module] = {}
        self.initial: dict[str, Weights] = {}
        for architecture, label in labels.items():
            self.modules[label] = build_module(architecture, shape, self.classes).to(device)
            self.initial[label] = self._initial_weights(architecture)
        dtype = torch.get_default_dtype()
        samples = federation.samples
        self.x = torch.as_tensor(samples.x, dtype=dtype, device=device)
        self.y = torch.as_tensor(samples.y, device=device)
        self.public_x = torch.as_tensor(samples.public_x, dtype=dtype, device=device)
        self.records: dict[int, ClientRecord] = {}

    def run(
        self, task: Task, messages: Mapping[int, Message], round: int
    ) -> tuple[dict[int, Message], dict[int, ClientRecord]]:
        """Each client's reply to its message, and what each then holds.

        The records are not stored yet: :meth:`commit` does that, once the round is whole.
        """
        replies, records = {}, {}
        for client_id, message in messages.items():
            client = self._client(client_id, round)
            with torch.random.fork_rng(devices=[]):  # for modules that draw, such as dropout
                torch.manual_seed(stream_key(self.seed, "module", client_id, round))
                reply = task(client, message)
            if reply is not None:
                replies[client_id] = reply
            records[client_id] = ClientRecord(client.weights, client.state)
        return replies, records

    def commit(self, records: Mapping[int, ClientRecord]) -> None:
        self.records.update(records)

    def models(self, client: int, message: Message, round: int) -> dict[str, Judged]:
        """The models of ``client`` that the algorithm wants judged."""
        return self.algorithm.models(self._client(client, round), message)

    def evaluate(
        self, messages: Mapping[int, Message], round: int
    ) -> dict[str, dict[str, np.ndarray]]:
        """Per model kind, one number per client: ``{"personal": {"test_accuracy": …}}``."""
        columns: dict[str, dict[str, list[float]]] = {}
        for client, message in messages.items():
            for kind, model in self.models(client, message, round).items():
                column = columns.setdefault(kind, {})
                for part in PARTS:
                    accuracy, loss = self._judge(client, model, part)
                    column.setdefault(f"{part}_accuracy", []).append(accuracy)
                    column.setdefault(f"{part}_loss", []).append(loss)
        return {
            kind: {name: np.array(values) for name, values in column.items()}
            for kind, column in columns.items()
        }

    def _client(self, client: int, round: int) -> SequentialClient:
        record = self.records.get(client) or ClientRecord(self._first_weights(client))
        return SequentialClient(self, client, round, record)

    def _first_weights(self, client: int) -> Weights:
        if self._own_initial:
            return self._initial_weights(self.dealt[client], client)
        return self.initial[self.architectures[client]]

    def _initial_weights(self, architecture: Architecture, client: int = -1) -> Weights:
        params, buffers, _ = initial_weights(
            architecture, self.federation.input_shape, self.classes, self.seed, client
        )
        separate = self.training.public_batchnorm == "separate"
        weights = Weights(params, buffers, buffers if separate else {}).clone()
        return Weights(*({n: t.to(self.device) for n, t in part.items()} for part in weights))

    def _judge(self, client: int, model: Judged, part: str) -> tuple[float, float]:
        where = torch.as_tensor(getattr(self.federation.splits[client], part), device=self.device)
        labels = self.y[where]
        if isinstance(model, Weights):
            logits = self.logits(self.architectures[client], model, self.x[where])
        else:
            logits = model.logits.expand(len(labels), -1)
        accuracy = (logits.argmax(1) == labels).double().mean()
        return float(accuracy), float(cross_entropy(logits, labels))

    @torch.no_grad()
    def logits(
        self, architecture: str, weights: Weights, x: Tensor, public: bool = False
    ) -> Tensor:
        """Logits in evaluation mode."""
        module = self.modules[architecture].eval()
        buffers = weights.public_buffers if public and weights.public_buffers else weights.buffers
        tensors = {**weights.params, **buffers}
        return torch.cat(
            [
                functional_call(module, tensors, (batch,))
                for batch in torch.split(x, EVALUATION_BATCH)
            ]
        )


class SequentialClient:
    """One client; see :class:`perfed.core.algorithm.Client` for what each member means."""

    def __init__(
        self, engine: SequentialEngine, client: int, round: int, record: ClientRecord
    ) -> None:
        self._engine = engine
        self._id = client
        self._round = round
        self._sgd_calls = 0
        self._train = torch.as_tensor(engine.federation.splits[client].train, device=engine.device)
        self._architecture = engine.architectures[client]
        self.weights = record.weights
        self.state = record.state
        self.samples = torch.tensor(len(self._train))

    def soft_decisions(self, weights: Weights | None = None) -> Tensor:
        engine = self._engine
        logits = engine.logits(
            self._architecture, weights or self.weights, engine.public_x, public=True
        )
        return logits.softmax(1)

    def label_counts(self) -> Tensor:
        labels = self._engine.y[self._train]
        return torch.bincount(labels, minlength=self._engine.classes)

    def sgd(self, weights: Weights, objective: Objective, *inputs: Tensor) -> Weights:
        engine, training = self._engine, self._engine.training
        module = engine.modules[self._architecture].train()
        weights = weights.clone()  # what the caller holds stays as it is
        params = [param.requires_grad_() for param in weights.params.values()]
        network = Network(module, weights, training.public_batchnorm)
        rate = training.learning_rate_at(self._round)
        for private, public in self._batches():
            loss = objective(network, private, public, *inputs)
            gradients = torch.autograd.grad(loss, params, materialize_grads=True)
            with torch.no_grad():
                for param, gradient in zip(params, gradients, strict=True):
                    param -= rate * gradient
        return Weights(*({n: t.detach() for n, t in part.items()} for part in weights))

    def _batches(self) -> Iterable[tuple[Private, Public | None]]:
        """τ pairs of mini-batches, drawn uniformly and independently."""
        engine, training = self._engine, self._engine.training
        private = self._draw("private", training.batch_size, len(self._train))
        public = None
        if engine.algorithm.needs_public_set:
            public = self._draw("public", training.public_batch_size, len(engine.public_x))
        self._sgd_calls += 1
        for step in range(training.steps):
            chosen = self._train[private[step]]
            yield (
                Private(engine.x[chosen], engine.y[chosen]),
                None if public is None else Public(engine.public_x[public[step]], public[step]),
            )

    def _draw(self, what: str, batch: int, bound: int) -> Tensor:
        """τ×batch positions. A second training in one round has streams of its own."""
        engine = self._engine
        key = stream_key(engine.seed, f"{what}-batches/{self._sgd_calls}", self._id, self._round)
        return uniform_indices(key, (engine.training.steps, batch), bound, engine.device)
