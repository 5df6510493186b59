"""The contract: what an algorithm says, and what it may ask for.

An algorithm is a frozen dataclass of its hyper-parameters and these methods, written for *one*
client and knowing nothing of where it runs. Only ``client_round`` is required::

    start               server      the state before the first round
    first_message       one client  what it sends before any training
    broadcast           server      what it sends to one selected client
    client_round        one client  what the client does with it, and sends back
    merge               server      the new state from what came back
    messages            both        what these messages hold, by which each is measured on arrival
    describe            server      a few numbers on the new state, for the run directory
    placed              server      the cluster of each client that answered, for the same
    evaluation_message  server      what a client needs to have its models evaluated
    models              one client  which model(s) of this client are to be evaluated
    networks            both        networks beside the clients' own

State is a tree of tensors (:mod:`perfed.core.tree`). An objective must be a pure function of
tensors, without an ``if`` on a tensor's value or a tensor hidden in its closure, so that an engine
may train many clients as one batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, overload

import numpy as np
import torch
from torch import Tensor, nn

from perfed.core.averaging import weighted_average
from perfed.core.declaration import Messages
from perfed.core.message import Message
from perfed.core.network import Between, Network
from perfed.core.predictor import (
    Adjusted,
    ClassPrior,
    Mixture,
    NearestPrototype,
    OfNetwork,
    Predictor,
    Spliced,
)
from perfed.core.registry import Component, Registry
from perfed.core.streams import numpy_stream
from perfed.core.tree import OWN, Tree, Weights

__all__ = [
    "OWN",
    "Adjusted",
    "Algorithm",
    "Between",
    "ClassPrior",
    "Client",
    "ClientInfo",
    "Mixture",
    "NearestPrototype",
    "Network",
    "Objective",
    "OfNetwork",
    "Parts",
    "Predictor",
    "Private",
    "Public",
    "Reply",
    "Sends",
    "Server",
    "Spliced",
    "algorithms",
    "free_parameters",
    "needs",
    "supervised",
    "trainable",
    "weighted_average",
]


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


Objective = Callable[..., Tensor]
"""A scalar, of a network (or a mapping of several), two mini-batches and the inputs."""


@dataclass(frozen=True)
class Parts:
    """An objective that is the sum of two. Only the first is given private samples, so only its
    gradients need noise where training is private."""

    private: Objective | None
    public: Objective

    def __call__(self, model: Any, private: Any, public: Any, *inputs: Any) -> Tensor:
        if self.private is None:
            return self.public(model, None, public, *inputs)
        first = self.private(model, private, public, *inputs)
        return first + self.public(model, None, public, *inputs)


class Client(Protocol):
    """One client, as an algorithm sees it: the same on every engine.

    ``weights`` is the client's own model and ``state`` whatever else the algorithm keeps there;
    both may be assigned, and stay with the client until it is selected again.
    """

    weights: Weights
    state: Tree
    samples: Tensor
    """Number of training samples (0-dimensional)."""
    steps: int
    """τ: training steps of this client in a round."""
    learning_rate: float
    """η in this round."""

    def initial(self, network: str) -> Weights:
        """The initial weights of a network that :meth:`Algorithm.networks` names: the same for all
        clients of an architecture."""

    def soft_decisions(self, weights: Weights | None = None) -> Tensor:
        """Class probabilities on the whole public set, |P|×N, in evaluation mode."""

    def logits(
        self, weights: Weights | None = None, on: str = "public", network: str = OWN
    ) -> Tensor:
        """Logits in evaluation mode, a row for each sample of the ``public`` set, or of the
        client's ``train`` or ``validation`` data."""

    def features(
        self, weights: Weights | None = None, on: str = "train", network: str = OWN
    ) -> Tensor:
        """What goes into the network's last layer, in evaluation mode; a row for each sample."""

    def head(self, features: Tensor, weights: Weights | None = None) -> Tensor:
        """The logits that the last layer makes of features, in evaluation mode."""

    def class_sums(self, rows: Tensor, on: str = "train") -> tuple[Tensor, Tensor]:
        """The sum of ``rows``, one for each sample of ``train`` or ``validation``, by class; and
        how many samples each class has."""

    def head_of(self, weights: Weights) -> dict[str, Tensor]:
        """The parameters of the last layer: a part of the model that can be sent and averaged."""

    def with_head(self, weights: Weights, head: Mapping[str, Tensor]) -> Weights:
        """The same model with another last layer."""

    def base_of(self, weights: Weights) -> Weights:
        """All but the last layer, with all running statistics."""

    @overload
    def sgd(
        self,
        weights: Weights,
        objective: Objective,
        *inputs: Any,
        steps: int | None = None,
        rate: float | None = None,
        batches: int = 1,
        stream: int | None = None,
        sample_clip: float | None = None,
    ) -> Weights: ...

    @overload
    def sgd(
        self,
        weights: Mapping[str, Weights],
        objective: Objective,
        *inputs: Any,
        steps: int | None = None,
        rate: float | None = None,
        batches: int = 1,
        stream: int | None = None,
        sample_clip: float | None = None,
    ) -> dict[str, Weights]: ...

    def sgd(self, weights: Any, objective: Any, *inputs: Any, **options: Any) -> Any:
        """``weights`` after τ steps of size η on ``objective``, by ``training.optimizer``.

        The objective gets a network, a private and a public mini-batch, and ``inputs`` (tensors,
        or dictionaries of them). ``steps`` and ``rate`` stand in for τ and η. With ``batches`` > 1
        it gets a tuple of that many independent private mini-batches, of which the first is the
        one it would get otherwise. A second call in one round draws other mini-batches, unless
        ``stream`` says whose (0 for those of the first call).

        Several networks are trained as one: ``{"own": …, "small": …}``, by the names that
        :meth:`Algorithm.networks` gives. The objective then gets a mapping of networks. Two models
        of the client's own network are trained as one where ``networks`` gives the second a name.

        With ``training.optimizer_state: kept`` the n-th call of a round goes on with the state of
        the n-th call of the client's last round, so a method should make the same calls in each.

        With ``sample_clip`` the objective gets one private sample at a time; each sample's
        gradient is scaled down to at most this norm, and their mean is the step's gradient.
        """

    def losses(self, models: Sequence[Weights], part: str) -> Tensor:
        """Mean cross-entropy of each model on the client's ``train`` or ``validation`` data."""

    def likelihoods(self, models: Sequence[Predictor], part: str) -> Tensor:
        """The probability that each model gives to the label of each sample of the client's
        ``train`` or ``validation`` data, (models, samples). Models of the same weights share a
        pass over the samples."""

    def label_counts(self) -> Tensor:
        """How often each class occurs in the training data."""


@dataclass(frozen=True)
class ClientInfo:
    """What the server knows of a client."""

    id: int
    architecture: str
    samples: int
    """Training samples, as it told on joining."""


@dataclass(frozen=True)
class Reply:
    """What came back from one client."""

    client: ClientInfo
    message: Message
    weight: float
    """How much it counts in a mean over clients, by ``averaging`` of the experiment. The number of
    samples alone would let size count twice where clients are selected by it."""


@dataclass(frozen=True)
class Server:
    """The server's surroundings, as an algorithm sees them."""

    seed: int
    round: int
    architectures: Mapping[str, int]
    """How many clients there are of each architecture."""
    initial: Callable[[str, int], Weights]
    """The initial weights number 0, 1, … of an architecture; 0 is the one clients start from."""
    modules: Mapping[str, nn.Module]
    """A module of each architecture, for a server that trains (its own weights mean nothing)."""
    public: Callable[[], Tensor]
    """Makes ``public_x``: most servers never look at it."""
    head: Callable[[str], str] = lambda architecture: ""
    """The name of an architecture's last layer, where the algorithm says ``needs_features``."""

    @cached_property
    def public_x(self) -> Tensor:
        """The public set."""
        return self.public()

    def random(self, purpose: str) -> np.random.Generator:
        """A stream of this round's own."""
        return numpy_stream(self.seed, f"server/{purpose}", round=self.round)


Sends = Literal[
    "nothing",
    "outputs on public samples",
    "class means",
    "parts of networks",
    "a second network",
    "weights",
]
"""What clients send, from the least to the most: the order in which methods are listed."""


DECLARED = {"first_message": "has_opening", "evaluation_message": "evaluated_with_server"}
"""Hooks that some methods have, and what these must say of themselves."""


class Algorithm(Component):
    """Base class of all algorithms. See the module's docstring for the contract."""

    registry: ClassVar[Registry[Algorithm]]
    sends: ClassVar[Sends | None] = None
    """What clients send, for a reader who chooses a method; the details are in :meth:`messages`."""
    needs_public_set: ClassVar[bool] = False
    trains_on_public_set: ClassVar[bool] = False
    """Whether clients' objectives get public mini-batches."""
    has_opening: ClassVar[bool] = False
    """Whether clients send :meth:`first_message` before the first round."""
    evaluated_with_server: ClassVar[bool] = False
    """Whether evaluating a client's models takes :meth:`evaluation_message` from the server."""
    needs_features: ClassVar[bool] = False
    """Whether it looks at features or heads of networks."""
    shares_features: ClassVar[bool] = False
    """Whether features or heads of different clients meet: all networks then need one width."""
    needs_plain_sgd: ClassVar[bool] = False
    """Whether its arithmetic holds for plain SGD only: no momentum, no weight decay, no Adam."""

    uses_validation: ClassVar[bool] = False
    """Whether it looks at clients' validation samples. Their accuracy then is no held-out evidence,
    unless half of them are kept from it: ``split.second_validation``."""

    merges_by_mean: ClassVar[bool] = False
    """Whether :meth:`merge` takes means over replies, so that a median can stand for them."""
    not_private: ClassVar[str] = ""
    """Why differential privacy does not cover it, in words that go on after its name; empty: what
    clients send is made of models they trained, and of how many samples they have."""

    learns_from_others: ClassVar[bool] = True
    """Whether anything a client gets from the server changes what it learns."""
    reference: ClassVar[bool] = False
    """Whether reports measure the gains of the other methods against this one: local training."""

    def __init_subclass__(cls) -> None:
        """A hook that is written but not declared would never be called."""
        for hook, declared in DECLARED.items():
            if hook in vars(cls) and not getattr(cls, declared):
                raise TypeError(f"{cls.__name__} has {hook}: declare {declared} = True in it")

    def trains_everyone(self) -> bool:
        """Whether every client trains in every round, whatever the participation."""
        return False

    def networks(self) -> Mapping[str, Any]:
        """Networks beside the clients' own, by name: an architecture each, ``OWN`` for a second
        model of whatever network the client has, or a :class:`Between` for one that takes
        features. Clients may train and keep them; those that only the server uses are named here
        too."""
        return {}

    def check(self, clients_per_round: int) -> None:
        """Raise ConfigError where the options do not fit the experiment."""

    def messages(self) -> Messages:
        """What crosses, by name, shape, type and range; a message that does not fit is refused.
        By default nothing is declared, and any finite numbers are admitted."""
        return Messages()

    def start(self, server: Server) -> Tree:
        """The server's state before the first round."""
        return {}

    def first_message(self, client: Client) -> Message | None:
        """What a client of the initial set S(−1) sends, where ``has_opening`` says so."""
        return None

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message()

    @abstractmethod
    def client_round(self, client: Client, message: Message) -> Message: ...

    def speak(self, client: Client, message: Message) -> Message:
        """:meth:`client_round` where messages are private: of a client whose training is noised,
        and whose samples cannot be looked at otherwise. What it does at home is done apart."""
        return self.client_round(client, message)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        return state

    def describe(self, before: Tree, state: Tree) -> dict[str, Any]:
        """What a run's log says of a merge beside its traffic: numbers and lists of them, which
        stay on the server."""
        return {}

    def placed(self, state: Tree, replies: Sequence[Reply]) -> dict[int, int]:
        """The cluster in which the server sees each client that answered, after the merge. Of the
        sites of a federation nobody else tells it: what they choose themselves stays there."""
        return {}

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        """What a client must know from the server to have its models evaluated, where
        ``evaluated_with_server`` says so. It is counted apart from training's messages."""
        return Message()

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        """The models to evaluate: ``personal``, ``global`` or both (LM and GM in the paper)."""
        return {"personal": client.weights}


algorithms: Registry[Algorithm] = Registry("algorithm")
Algorithm.registry = algorithms


def needs(algorithm: type[Algorithm]) -> list[str]:
    """What a method asks of clients and their networks, in words."""
    asked = {
        "a public set": algorithm.needs_public_set,
        "validation samples": algorithm.uses_validation,
        "features of one width": algorithm.shares_features,
        "a last layer, the head": algorithm.needs_features,
        "clients of one network": algorithm.sends == "weights",
    }
    if algorithm.shares_features:  # says the same, and more
        del asked["a last layer, the head"]
    return [words for words, needed in asked.items() if needed]


def reference_algorithm() -> Algorithm:
    """The method that a gain is measured against: local training."""
    return next(algorithms[name] for name in algorithms if algorithms[name].reference)()


def supervised(model: Network, private: Private, public: Public | None, *inputs: Any) -> Tensor:
    """The plain objective: cross-entropy on the private mini-batch."""
    return torch.nn.functional.cross_entropy(model(private.x), private.y)


def free_parameters(module: nn.Module) -> set[str]:
    """The names of the parameters that training moves."""
    return {name for name, param in module.named_parameters() if param.requires_grad}


def trainable(module: nn.Module, weights: Weights) -> dict[str, Tensor]:
    """The parameters in ``weights`` that ``module`` does not freeze, ready for a gradient."""
    free = free_parameters(module)
    return {name: p.requires_grad_() for name, p in weights.params.items() if name in free}
