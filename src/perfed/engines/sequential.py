"""The reference engine: one client after another, as plainly as possible.

Every other engine is tested against this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
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
    trainable,
)
from perfed.core.message import Message
from perfed.core.metrics import PARTS
from perfed.core.streams import stream_key, torch_stream, uniform_indices
from perfed.core.tree import Tree, Weights
from perfed.data import Federation
from perfed.models import Models, build_module, initial_weights

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
        self.records: dict[int, ClientRecord] = {}

    def run(
        self, task: Task, messages: Mapping[int, Message], round: int
    ) -> tuple[dict[int, Message], dict[int, ClientRecord]]:
        """Each client's reply to its message, and what those that changed then hold.

        The records are not stored yet: :meth:`commit` does that, once the round is whole.
        """
        replies, records = {}, {}
        for client_id, message in messages.items():
            client = self._client(client_id, round)
            with torch_stream(self.seed, "module", client_id, round):
                reply = task(client, message)
            if reply is not None:
                replies[client_id] = reply
            if client.changed():
                records[client_id] = ClientRecord(client.weights, client.state)
        return replies, records

    def commit(self, records: Mapping[int, ClientRecord]) -> None:
        self.records.update(records)

    def models(self, client: int, message: Message, round: int) -> dict[str, Judged]:
        """The models of ``client`` that the algorithm wants judged."""
        with torch_stream(self.seed, "judged-module", client, round):
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

    def _judge(self, client: int, model: Judged, part: str) -> tuple[float, float]:
        where = self.positions(client, part)
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
        self._train = engine.positions(client, "train")
        self._architecture = engine.architectures[client]
        self._record = record
        self.weights = record.weights
        self.state = dict(record.state)
        self.samples = torch.tensor(len(self._train))
        self.steps = engine.training.steps
        self.learning_rate = engine.training.learning_rate_at(round)

    def changed(self) -> bool:
        """Whether there is anything new to keep: some methods leave a client's own model alone."""
        before, now = self._record.state, self.state
        same_state = before.keys() == now.keys() and all(before[k] is now[k] for k in now)
        return self.weights is not self._record.weights or not same_state

    def soft_decisions(self, weights: Weights | None = None) -> Tensor:
        engine = self._engine
        logits = engine.logits(
            self._architecture, weights or self.weights, engine.public_x, public=True
        )
        return logits.softmax(1)

    def label_counts(self) -> Tensor:
        labels = self._engine.y[self._train]
        return torch.bincount(labels, minlength=self._engine.classes)

    def loss(self, weights: Weights, part: str) -> Tensor:
        where = self._engine.positions(self._id, part)
        logits = self._engine.logits(self._architecture, weights, self._engine.x[where])
        return cross_entropy(logits, self._engine.y[where])

    def sgd(
        self,
        weights: Weights,
        objective: Objective,
        *inputs: Any,
        steps: int | None = None,
        rate: float | None = None,
        batches: int = 1,
        stream: int | None = None,
    ) -> Weights:
        engine = self._engine
        module = engine.modules[self._architecture].train()
        weights = weights.clone()  # what the caller holds stays as it is
        params = trainable(module, weights)
        network = Network(module, weights, engine.training.public_batchnorm)
        rate = self.learning_rate if rate is None else rate
        if stream is None:
            stream, self._sgd_calls = self._sgd_calls, self._sgd_calls + 1
        for private, public in self._batches(
            self.steps if steps is None else steps, batches, stream
        ):
            loss = objective(network, private, public, *inputs)
            gradients = torch.autograd.grad(loss, params, materialize_grads=True)
            with torch.no_grad():
                for param, gradient in zip(params, gradients, strict=True):
                    param -= rate * gradient
        return Weights(*({n: t.detach() for n, t in part.items()} for part in weights))

    def _batches(
        self, steps: int, count: int, stream: int
    ) -> Iterator[tuple[Private | tuple[Private, ...], Public | None]]:
        """``steps`` times ``count`` private mini-batches and a public one, drawn uniformly."""
        engine, training = self._engine, self._engine.training

        def draw(what: str, batch: int, bound: int) -> Tensor:
            key = stream_key(engine.seed, f"{what}/{stream}", self._id, self._round)
            return uniform_indices(key, (steps, batch), bound, engine.device)

        private = [
            draw(f"private-batches{n or ''}", training.batch_size, len(self._train))
            for n in range(count)
        ]
        public = None
        if engine.algorithm.trains_on_public_set:
            public = draw("public-batches", training.public_batch_size, len(engine.public_x))
        for step in range(steps):
            chosen = [self._train[positions[step]] for positions in private]
            drawn = tuple(Private(engine.x[where], engine.y[where]) for where in chosen)
            yield (
                drawn if count > 1 else drawn[0],
                None if public is None else Public(engine.public_x[public[step]], public[step]),
            )
