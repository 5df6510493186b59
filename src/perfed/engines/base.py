"""What every engine has in common: the requests a client makes, and who makes them.

A client method of an algorithm runs as a *job*. Whatever is heavy in it (training, a forward pass)
it does not do itself: it asks for it, with a request, and waits for the answer. How jobs take
turns, and how requests are answered, is all an engine decides. A simulation does not see jobs: it
makes a *call*, one method for several clients, wherever those live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.core.algorithm import (
    Adjusted,
    ClassPrior,
    Judged,
    Mixture,
    Objective,
    Private,
    Public,
    mixed_logits,
)
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.streams import stream_key, torch_stream, uniform_indices
from perfed.core.tree import Tree, Weights
from perfed.engines.precision import Precision

if TYPE_CHECKING:
    from perfed.engines.population import Population


@dataclass
class ClientRecord:
    """What stays with a client from one round it takes part in to the next."""

    weights: Weights
    state: Tree = field(default_factory=dict)
    """What the algorithm keeps."""
    kept: Tree = field(default_factory=dict)
    """What is kept around the algorithm: the state of an optimizer or of the wire."""

    def tree(self) -> Tree:
        """As it is stored: in checkpoints, on disk, at a site."""
        return {"model": self.weights, "state": self.state, "kept": self.kept}

    @classmethod
    def from_tree(cls, tree: Tree) -> ClientRecord:
        """The inverse of :meth:`tree`; empty levels leave no trace in a file."""
        return cls(tree["model"], tree.get("state", {}), tree.get("kept", {}))


@dataclass(frozen=True, eq=False)
class Sgd:
    """Please train: see :meth:`perfed.core.algorithm.Client.sgd`."""

    client: EngineClient
    weights: Weights
    objective: Objective
    inputs: tuple[Any, ...]
    steps: int
    rate: float
    batches: int
    stream: int

    def private_keys(self) -> list[int]:
        """The streams that private mini-batches are drawn from, one for each of ``batches``."""
        return [self._key(f"private-batches{n or ''}") for n in range(self.batches)]

    def public_key(self) -> int:
        return self._key("public-batches")

    def _key(self, what: str) -> int:
        client = self.client
        return stream_key(client.population.seed, f"{what}/{self.stream}", client.id, client.round)


@dataclass(frozen=True, eq=False)
class Logits:
    """Please run forward in evaluation mode: on the whole public set, or on samples of its own."""

    client: EngineClient
    weights: Weights
    where: Tensor | None
    """Positions in the population's samples; None for the public set."""

    @property
    def public(self) -> bool:
        return self.where is None

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, and the running statistics to use."""
        params, buffers, public_buffers = self.weights
        return params | (public_buffers if self.public and public_buffers else buffers)


LEARNT_FROM = ("train", "validation")  # never from those a client is judged by
Request = Sgd | Logits
Ask = Callable[[Request], Any]


@dataclass(frozen=True)
class Job:
    """A client method to run, with the address of the stream its module may draw from."""

    client: EngineClient
    work: Callable[[], Any]
    purpose: str

    def stream(self) -> AbstractContextManager[None]:
        """Inside, torch's global generators are the job's own."""
        return torch_stream(*self._address())

    def key(self) -> int:
        return stream_key(*self._address())

    def _address(self) -> tuple[int, str, int, int]:
        client = self.client
        return client.population.seed, self.purpose, client.id, client.round


Method = Literal["first_message", "client_round", "models", "judge"]


@dataclass(frozen=True)
class Call:
    """One method, for each client of a population that has a message here."""

    population: Population
    method: Method
    messages: Mapping[int, Message]
    round: int


@dataclass(frozen=True)
class Outcome:
    """What the server and the run directory learn of what a client did."""

    reply: Message | None
    changed: bool
    """Whether it has something new to keep."""
    facts: Mapping[str, float]
    """The numbers in its state: its cluster, say."""
    fault: str | None
    """The name of a tensor that is not finite."""


class Engine(Protocol):
    """Where and how clients execute."""

    name: str
    precision: Precision

    def expect(self, population: Population, clients_a_round: int) -> None:
        """Make ready for a population of which so many clients train in a round."""

    def perform(self, calls: Sequence[Call]) -> list[Any]:
        """What each call gives, in the order of its messages: an :class:`Outcome` by client, for
        ``models`` the models by client, for ``judge`` a column of all clients for each number."""

    def commit(self, population: Population) -> None:
        """Keep what the last round changed; without this it leaves no trace."""

    def collect(self, population: Population) -> None:
        """Have all that clients keep in ``population.records``, wherever they live."""

    def facts(self) -> dict[str, Any]:
        """What a run directory says of how it was executed."""

    def close(self) -> None:
        """Give back what is not this process's memory."""


class EngineClient:
    """One client; see :class:`perfed.core.algorithm.Client` for what each member means."""

    def __init__(self, population: Population, client: int, round: int) -> None:
        self.population = population
        self.id = client
        self.round = round
        self.architecture = population.architectures[client]
        self.ask: Ask
        """Where requests go: set by the engine that performs this client's job."""
        self._record = population.record(client)
        self._sgd_calls = 0
        self.weights = self._record.weights
        self.state = dict(self._record.state)
        self.kept = dict(self._record.kept)
        self.samples = torch.tensor(population.train_size(client))
        self.steps = population.training.steps
        self.learning_rate = population.training.learning_rate_at(round)

    def changed(self) -> bool:
        """Whether there is anything new to keep: some methods leave a client's own model alone."""
        before = self._record
        return not (
            self.weights is before.weights
            and _same_entries(self.state, before.state)
            and _same_entries(self.kept, before.kept)
        )

    def record(self) -> ClientRecord:
        """What it holds now."""
        return ClientRecord(self.weights, self.state, self.kept)

    def soft_decisions(self, weights: Weights | None = None) -> Tensor:
        logits: Tensor = self.ask(Logits(self, weights or self.weights, None))
        return logits.softmax(1)

    def label_counts(self) -> Tensor:
        labels = self.population.y[self.population.positions(self.id, "train")]
        return torch.bincount(labels, minlength=self.population.classes)

    def loss(self, weights: Weights, part: str) -> Tensor:
        where = self._own(part)
        return cross_entropy(self.logits(weights, where), self.population.y[where])

    def likelihoods(self, model: Judged, part: str) -> Tensor:
        where = self._own(part)
        probabilities = self.logits(model, where).softmax(1)
        return probabilities.gather(1, self.population.y[where][:, None])[:, 0]

    def _own(self, part: str) -> Tensor:
        """Where the samples are that an algorithm may look at."""
        if part not in LEARNT_FROM:
            raise ConfigError(
                f"an algorithm looks at '{part}' samples of a client: "
                f"must be {' or '.join(LEARNT_FROM)}"
            )
        return self.population.positions(self.id, part)

    def logits(self, model: Judged, where: Tensor) -> Tensor:
        """What ``model`` says of the population's samples at ``where``."""
        if isinstance(model, ClassPrior):
            return model.logits.expand(len(where), -1)
        if isinstance(model, Adjusted):
            return model.scale * self.logits(model.weights, where) + model.offset
        if isinstance(model, Mixture):
            return mixed_logits([self.logits(part, where) for part in model.models], model.shares)
        logits: Tensor = self.ask(Logits(self, model, where))
        return logits

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
        steps = self.steps if steps is None else steps
        rate = self.learning_rate if rate is None else rate
        if stream is None:
            stream, self._sgd_calls = self._sgd_calls, self._sgd_calls + 1
        if not steps:
            return weights
        trained: Weights = self.ask(
            Sgd(self, weights, objective, inputs, steps, rate, batches, stream)
        )
        return trained


def _same_entries(now: Tree, before: Tree) -> bool:
    return before.keys() == now.keys() and all(before[name] is now[name] for name in now)


def mini_batches(request: Sgd) -> Iterator[tuple[Private | tuple[Private, ...], Public | None]]:
    """What each step of one client's training sees, drawn uniformly."""
    population = request.client.population
    training = population.training
    train = population.positions(request.client.id, "train")

    def draw(key: int, batch: int, bound: int) -> Tensor:
        return uniform_indices(key, (request.steps, batch), bound, population.device)

    private = [draw(key, training.batch_size, len(train)) for key in request.private_keys()]
    public = None
    if population.algorithm.trains_on_public_set:
        bound = len(population.public_x)
        public = draw(request.public_key(), training.public_batch_size, bound)
    for step in range(request.steps):
        chosen = [train[positions[step]] for positions in private]
        drawn = tuple(Private(population.x[where], population.y[where]) for where in chosen)
        yield (
            drawn if len(drawn) > 1 else drawn[0],
            None if public is None else Public(population.public_x[public[step]], public[step]),
        )
