"""The contract: what an algorithm says, and what it may ask for.

An algorithm is a frozen dataclass of its hyper-parameters and these methods, written for *one*
client and knowing nothing of where it runs. Only ``client_round`` is required::

    start               server      the state before the first round
    first_message       one client  what it sends before any training
    broadcast           server      what it sends to one selected client
    client_round        one client  what the client does with it, and sends back
    merge               server      the new state from what came back
    describe            server      a few numbers on the new state, for the run directory
    evaluation_message  server      what a client needs to have its models judged
    models              one client  which model(s) of this client are to be judged

State is a tree of tensors (:mod:`perfed.core.tree`). An objective must be a pure function of
tensors, without an ``if`` on a tensor's value or a tensor hidden in its closure, so that an engine
may train many clients as one batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from perfed.core.message import Message
from perfed.core.registry import Component, Registry
from perfed.core.streams import numpy_stream
from perfed.core.tree import Tree, Weights, combine


@dataclass(frozen=True)
class Private:
    """A mini-batch of a client's training data."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Public:
    """A mini-batch of the public set; ``index`` says which of its samples."""

    x: Tensor
    index: Tensor


class Network:
    """A module with given weights, as an objective sees it while training."""

    def __init__(self, module: nn.Module, weights: Weights, public_batchnorm: str) -> None:
        self._module = module
        self._weights = weights
        self._public_batchnorm = public_batchnorm

    @property
    def params(self) -> dict[str, Tensor]:
        return self._weights.params

    def at(self, params: dict[str, Tensor]) -> Network:
        """The same network at other parameters; running statistics here are not moved by it."""
        buffers = {name: b.clone() for name, b in self._weights.buffers.items()}
        return Network(self._module, Weights(params, buffers), self._public_batchnorm)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of private samples; moves BatchNorm's running statistics."""
        return self._forward(x, self._weights.buffers)

    def public(self, x: Tensor) -> Tensor:
        """Logits of public samples; BatchNorm as ``training.public_batchnorm`` says."""
        if self._public_batchnorm == "shared":
            return self._forward(x, self._weights.buffers)
        if self._public_batchnorm == "separate":
            return self._forward(x, self._weights.public_buffers)
        return self._forward(x, {name: b.clone() for name, b in self._weights.buffers.items()})

    def observe(self, x: Tensor) -> None:
        """Let public samples pass, for BatchNorm's statistics of them where these are kept."""
        if self._weights.public_buffers:
            self.public(x)

    def _forward(self, x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        logits: Tensor = functional_call(self._module, {**self._weights.params, **buffers}, (x,))
        return logits.to(x.dtype)  # a network may compute in fewer bits; its loss does not


Objective = Callable[..., Tensor]  # (Network, Private, Public | None, *inputs) → scalar


class ClassPrior(NamedTuple):
    """A model that looks at nothing: the same logits for every input."""

    logits: Tensor


class Adjusted(NamedTuple):
    """A model whose logits are scaled, and then moved: a label mix put back, say."""

    weights: Weights
    scale: Tensor
    offset: Tensor


class Mixture(NamedTuple):
    """Models whose class probabilities are averaged, each with its share."""

    models: tuple[Weights | Adjusted, ...]
    shares: Tensor


Judged = Weights | Adjusted | Mixture | ClassPrior


def mixed_logits(logits: Sequence[Tensor], shares: Tensor) -> Tensor:
    """Of a mixture, from its models' logits: the logarithm of their mean probabilities."""
    said = torch.stack([z.log_softmax(1) for z in logits])
    return torch.logsumexp(said + shares.log()[:, None, None], dim=0)


class Client(Protocol):
    """One client, as an algorithm sees it: the same on every engine.

    ``weights`` is the client's own model and ``state`` whatever else the algorithm keeps there;
    both may be assigned, and stay with the client until it is drawn again.
    """

    weights: Weights
    state: Tree
    samples: Tensor
    """Number of training samples (0-dimensional)."""
    steps: int
    """τ: SGD steps a round."""
    learning_rate: float
    """η in this round."""

    def soft_decisions(self, weights: Weights | None = None) -> Tensor:
        """Class probabilities on the whole public set, |P|×N, in evaluation mode."""

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
        """``weights`` after τ plain SGD steps of size η on ``objective``.

        The objective gets a network, a private and a public mini-batch, and ``inputs`` (tensors,
        or dictionaries of them). ``steps`` and ``rate`` stand in for τ and η. With ``batches`` > 1
        it gets a tuple of that many independent private mini-batches, of which the first is the
        one it would get otherwise. A second call in one round draws other mini-batches, unless
        ``stream`` says whose (0 for those of the first call).
        """

    def loss(self, weights: Weights, part: str) -> Tensor:
        """Mean cross-entropy on the client's ``train`` or ``validation`` data."""

    def likelihoods(self, model: Judged, part: str) -> Tensor:
        """The probability that ``model`` gives to the label of each sample of the client's
        ``train`` or ``validation`` data."""

    def label_counts(self) -> Tensor:
        """How often each class occurs in the training data."""


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client."""

    id: int
    architecture: str


@dataclass(frozen=True)
class Reply:
    """What came back from one client."""

    client: ClientInfo
    message: Message


@dataclass(frozen=True)
class Server:
    """The server's surroundings, as an algorithm sees them."""

    seed: int
    round: int
    population: Mapping[str, int]
    """How many clients there are of each architecture."""
    initial: Callable[[str, int], Weights]
    """The initial weights number 0, 1, … of an architecture; 0 is the one clients start from."""
    modules: Mapping[str, nn.Module]
    """A module of each architecture, for a server that trains (its own weights mean nothing)."""
    public_x: Tensor
    """The public set."""

    def random(self, purpose: str) -> np.random.Generator:
        """A stream of this round's own."""
        return numpy_stream(self.seed, f"server/{purpose}", round=self.round)


class Algorithm(Component):
    """Base class of all algorithms. See the module's docstring for the contract."""

    registry: ClassVar[Registry[Algorithm]]
    needs_public_set: ClassVar[bool] = False
    trains_on_public_set: ClassVar[bool] = False
    """Whether clients' objectives get public mini-batches."""
    learns_from_others: ClassVar[bool] = True
    """Whether anything a client gets from the server changes what it learns."""
    reference: ClassVar[bool] = False
    """Whether reports measure the gains of the other methods against this one: local training."""

    def trains_everyone(self) -> bool:
        """Whether every client trains in every round, whatever the participation."""
        return False

    def check(self, clients_per_round: int) -> None:
        """Raise ConfigError where the options do not fit the experiment."""

    def start(self, server: Server) -> Tree:
        """The server's state before the first round."""
        return {}

    def first_message(self, client: Client) -> Message | None:
        """What a client of the initial set S(−1) sends; None where a method has no such set."""
        return None

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message()

    @abstractmethod
    def client_round(self, client: Client, message: Message) -> Message: ...

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        return state

    def describe(self, before: Tree, state: Tree) -> dict[str, Any]:
        """What a run's log says of a merge beside its traffic: numbers and lists of them, which
        stay on the server."""
        return {}

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        """What a client must know from the server to have its models judged (not counted)."""
        return Message()

    def models(self, client: Client, message: Message) -> dict[str, Judged]:
        """The models to evaluate: ``personal``, ``global`` or both (LM and GM in the paper)."""
        return {"personal": client.weights}


algorithms: Registry[Algorithm] = Registry("algorithm")
Algorithm.registry = algorithms


def reference_algorithm() -> Algorithm:
    """The method that a gain is measured against: local training."""
    return next(algorithms[name] for name in algorithms if algorithms[name].reference)()


def supervised(model: Network, private: Private, public: Public | None, *inputs: Any) -> Tensor:
    """The plain objective: cross-entropy on the private mini-batch."""
    return torch.nn.functional.cross_entropy(model(private.x), private.y)


def weighted_average(weights: Sequence[Weights], amounts: Sequence[float]) -> Weights:
    """The mean of models, parameters and buffers alike, in proportion to ``amounts``."""
    shares = [amount / sum(amounts) for amount in amounts]

    def mean(tensors: Sequence[Tensor]) -> Tensor:
        total = sum(share * t.double() for share, t in zip(shares, tensors, strict=True))
        assert isinstance(total, Tensor)
        whole = not tensors[0].is_floating_point()  # BatchNorm's count of batches
        return (total.round() if whole else total).to(tensors[0].dtype)

    return combine(weights, mean)


def trainable(module: nn.Module, weights: Weights) -> list[Tensor]:
    """The parameters in ``weights`` that ``module`` does not freeze, ready for a gradient."""
    free = {name for name, param in module.named_parameters() if param.requires_grad}
    return [param.requires_grad_() for name, param in weights.params.items() if name in free]
