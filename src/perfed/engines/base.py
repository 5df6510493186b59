"""What every engine has in common: the requests a client makes, and who makes them.

A client method of an algorithm runs as a *job*. Whatever is heavy in it (training, a forward pass)
it does not do itself: it asks for it, with a request, and waits for the answer. How jobs take
turns, and how requests are answered, is all an engine decides. A simulation does not see jobs: it
makes a *call*, one method for several clients, wherever those live.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from perfed.core.algorithm import Objective, Predictor, Private, Public, free_parameters
from perfed.core.augmentation import CODES, augmented
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.network import base_of, head_outputs, head_tensors, on_features
from perfed.core.pixels import samples_at
from perfed.core.predictor import What
from perfed.core.privacy import Privacy
from perfed.core.streams import (
    chosen_each,
    random_bits,
    shuffled_indices,
    stream_key,
    torch_stream,
    uniform_indices,
)
from perfed.core.tree import OWN, Tree, Weights, flatten
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
    models: Mapping[str, Weights]
    """By the networks' names; a client's own is ``OWN``."""
    states: Mapping[str, Tree]
    """The optimizer's, by network."""
    single: bool
    """Whether the objective gets one network, not a mapping."""
    objective: Objective
    inputs: tuple[Any, ...]
    steps: int
    rate: float
    batches: int
    stream: int
    sample_clip: float | None
    privacy: Privacy | None = None
    """Where what comes of it is to hide single samples: each step is noised."""

    @property
    def room(self) -> int:
        """Steps to make room for: where clients make different numbers of them, the most."""
        population = self.client.population
        return max(self.steps, population.most_steps) if population.uneven else self.steps

    @property
    def flops(self) -> int:
        """Floating-point operations, counted and not measured."""
        networks = self.labels().values()
        return self.steps * sum(map(self.client.population.step_flops, networks))

    def labels(self) -> dict[str, str]:
        """The label of each network's architecture."""
        return {name: self.client.label(name) for name in self.models}

    def private_keys(self) -> list[int]:
        """The streams that private mini-batches are drawn from, one for each of ``batches``."""
        return self._keys("private-batches")

    def augmentation_keys(self) -> list[int]:
        return self._keys("augmentation")

    def public_key(self) -> int:
        return self._key("public-batches")

    def randomness_key(self) -> int:
        """Of what its networks draw."""
        return self._key("randomness")

    @property
    def draws_numbers(self) -> bool:
        """Whether one of its networks draws random numbers while it trains."""
        return any(map(self.client.population.draws_numbers, self.labels().values()))

    def _keys(self, what: str) -> list[int]:
        return [self._key(f"{what}{n or ''}") for n in range(self.batches)]

    def _key(self, what: str) -> int:
        client = self.client
        return stream_key(client.seed, f"{what}/{self.stream}", client.id, client.round)

    @property
    def noise_deviation(self) -> float:
        """Of the noise on the sum of a step's gradients."""
        return 0.0 if self.privacy is None else self.privacy.noise * self.privacy.clip

    @property
    def samples_a_step(self) -> int:
        """What the sum is divided by."""
        return self.client.population.training.batch_size

    def noise_key(self) -> int:
        return self._key("noise")

    @cached_property
    def chosen(self) -> Chosen:
        """Where training is private: which samples each step sees, each by its own chance. A step
        has as many places as the largest of them needs, and a few more: so sizes are few."""
        client = self.client
        population, (key,) = client.population, self.private_keys()
        count, rate = population.train_size(client.id), population.account(client.id).rate
        chosen = chosen_each(key, self.steps, count, rate, population.device)
        most = int(chosen.sum(1).max())
        width = min(count, max(1, -(-most // PLACES) * PLACES))
        order = (~chosen).to(torch.int8).argsort(dim=1, stable=True)[:, :width]
        return Chosen(order, chosen.gather(1, order))


class Chosen(NamedTuple):
    """The samples of each step of a private training, (steps, places)."""

    which: Tensor
    """Numbers among the client's training samples."""
    filled: Tensor
    """Whether a place has a sample that counts."""


class Trained(NamedTuple):
    """The answer to :class:`Sgd`."""

    models: dict[str, Weights]
    states: dict[str, Tree]


@dataclass(frozen=True, eq=False)
class Forward:
    """Please run a network in evaluation mode: on the whole public set, or on samples of one's
    own."""

    client: EngineClient
    weights: Weights
    where: Tensor | None
    """Positions in the population's samples; None for the public set."""
    what: What = "logits"
    network: str = OWN

    @property
    def public(self) -> bool:
        return self.where is None

    @property
    def flops(self) -> int:
        """Floating-point operations, counted and not measured."""
        population = self.client.population
        samples = population.public_x if self.where is None else self.where
        return len(samples) * population.forward_flops(self.label)

    @property
    def label(self) -> str:
        """Of the network's architecture."""
        return self.client.label(self.network)

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, and the running statistics to use."""
        params, buffers, public_buffers = self.weights
        return params | (public_buffers if self.public and public_buffers else buffers)


STEPS = "private_steps"
"""Where a client keeps how many noised steps it has made."""
PLACES = 8  # of samples in a private step come together
LEARNT_FROM = ("train", "validation")  # never from those a client is evaluated on
Request = Sgd | Forward
Ask = Callable[[Sequence[Request]], list[Any]]


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


Method = Literal["first_message", "client_round", "models", "evaluate"]


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
    broken_model: str | None
    """The name of a tensor that it keeps and that is not finite."""
    broken_reply: str | None
    """The name of an array in its reply that is not finite."""


class Engine(Protocol):
    """Where and how clients execute."""

    name: str
    precision: Precision

    def expect(self, population: Population, clients_a_round: int) -> None:
        """Make ready for a population of which so many clients train in a round."""

    def perform(self, calls: Sequence[Call]) -> list[Any]:
        """What each call gives, in the order of its messages: an :class:`Outcome` by client, for
        ``models`` the models by client, for ``evaluate`` a column of clients for each number."""

    def commit(self, population: Population) -> None:
        """Keep what the last round changed; without this it leaves no trace."""

    def collect(self, population: Population) -> None:
        """Have all that clients keep in ``population.records``, wherever they live."""

    def facts(self) -> dict[str, Any]:
        """What a run directory says of how it was executed."""

    def close(self) -> None:
        """Give back what is not this process's memory."""


class State(dict[str, Any]):
    """What an algorithm keeps at a client: a tree of tensors. What is none is refused where it is
    set, since that line is the one to mend."""

    def __setitem__(self, name: str, value: Any) -> None:
        checked_state({name: value})
        super().__setitem__(name, value)


def checked_state(tree: Any) -> None:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"is a {type(tree).__name__}: must be tensors by name", "client.state")
    for name, value in tree.items():
        if not isinstance(value, Tensor | Weights | Mapping):
            raise ConfigError(
                f"'{name}' is a {type(value).__name__}: must be a tensor (torch.tensor(…)), "
                "weights, or tensors by name",
                "client.state",
            )


class EngineClient:
    """One client; see :class:`perfed.core.algorithm.Client` for what each member means."""

    def __init__(
        self, population: Population, client: int, round: int, evaluated: bool = False
    ) -> None:
        self.population = population
        self.id = client
        self.round = round
        self.seed = population.seed
        """Of its mini-batches."""
        self.architecture = population.architectures[client]
        self.ask: Ask
        """Where requests go, and answers come from: set by the engine that performs this client's
        job. Those that are asked at once can be answered at once."""
        self._record = population.record(client)
        self._evaluated = evaluated
        """Whether its models are only evaluated: what is trained then leaves no trace."""
        self._streams_used = self._trainings = 0
        self._positions: dict[str, Tensor] = {}
        """Where its samples are that it has looked at."""
        self.weights = self._record.weights
        self._state = State(self._record.state)
        self.kept = dict(self._record.kept)
        self.samples = torch.tensor(population.train_size(client))
        self.steps = population.training.steps_of(population.train_size(client))
        if not evaluated:
            self.steps = population.participation.steps(self.steps, population.seed, client, round)
        self.learning_rate = population.training.learning_rate_at(round, population.rounds)

    @property
    def state(self) -> Tree:
        return self._state

    @state.setter
    def state(self, tree: Tree) -> None:
        checked_state(tree)
        self._state = State(tree)

    def changed(self) -> bool:
        """Whether there is anything new to keep: some methods leave a client's own model alone."""
        before = self._record
        return not (
            self.weights is before.weights
            and _same_entries(self.state, before.state)
            and _same_entries(self.kept, before.kept)
        )

    def check_kept(self) -> None:
        """What an algorithm has left here can be kept."""
        if self.weights is not self._record.weights:
            self.population.check_weights(self.architecture, self.weights)
        if not _same_entries(self.state, self._record.state):
            flatten(self.state)

    def record(self) -> ClientRecord:
        """What it holds now."""
        return ClientRecord(self.weights, dict(self.state), self.kept)

    def label(self, network: str) -> str:
        """Of a network's architecture: the client's own, or one that the algorithm names."""
        own: str = self.architecture
        if network == OWN or network in self.population.second_models:
            return own
        return self.population.named(network, own)

    def initial(self, network: str) -> Weights:
        return self.population.initial_weights(self.label(network))

    # What networks say.

    def soft_decisions(self, weights: Weights | None = None) -> Tensor:
        return self.logits(weights).softmax(1)

    def logits(
        self, weights: Weights | None = None, on: str = "public", network: str = OWN
    ) -> Tensor:
        return self._outputs("logits", weights, on, network)

    def features(
        self, weights: Weights | None = None, on: str = "train", network: str = OWN
    ) -> Tensor:
        return self._outputs("features", weights, on, network)

    def class_sums(self, rows: Tensor, on: str = "train") -> tuple[Tensor, Tensor]:
        # As a matrix product: a GPU would add to indices in any order.
        member = one_hot(self.population.y[self._learnt_from(on)], self.population.classes)
        return member.T.to(rows) @ rows, member.sum(0)

    def label_counts(self) -> Tensor:
        labels = self.population.y[self.population.positions(self.id, "train")]
        return torch.bincount(labels, minlength=self.population.classes)

    def losses(self, models: Sequence[Weights], part: str) -> Tensor:
        where = self._learnt_from(part)
        for weights in models:
            self.population.check_weights(self.architecture, weights)
        said = self.ask([Forward(self, weights, where) for weights in models])
        labels = self.population.y[where]
        return torch.stack([cross_entropy(logits, labels) for logits in said])

    def likelihoods(self, models: Sequence[Predictor], part: str) -> Tensor:
        where = self._learnt_from(part)
        outputs = _Outputs(self, where, len(where))
        probabilities = torch.stack([model.logits(outputs) for model in models]).softmax(2)
        labels = self.population.y[where].expand(len(models), -1)
        return probabilities.gather(2, labels[..., None])[..., 0]

    def said(self, model: Predictor, where: Tensor) -> Tensor:
        """The logits of ``model`` for the population's samples at ``where``."""
        return model.logits(_Outputs(self, where, len(where)))

    def _outputs(self, what: What, weights: Weights | None, on: str, network: str) -> Tensor:
        if weights is None and network != OWN:
            raise ConfigError(f"the weights of '{network}' must be given", "algorithm")
        where = None if on == "public" else self._learnt_from(on)
        weights = self.weights if weights is None else weights
        self.population.check_weights(self.label(network), weights)
        rows: Tensor
        (rows,) = self.ask([Forward(self, weights, where, what, network)])
        return rows

    def _learnt_from(self, part: str) -> Tensor:
        """Where the samples are that an algorithm may look at."""
        if part not in LEARNT_FROM:
            raise ConfigError(
                f"an algorithm looks at '{part}' samples of a client: "
                f"must be {' or '.join(LEARNT_FROM)}"
            )
        algorithm = self.population.algorithm
        if part == "validation" and not algorithm.uses_validation:
            raise ConfigError(
                f"'{type(algorithm).__name__}' looks at validation samples: declare "
                "uses_validation = True in it"
            )
        if part not in self._positions:
            self._positions[part] = self.population.positions(self.id, part)
        return self._positions[part]

    # The last layer.

    def head(self, features: Tensor, weights: Weights | None = None) -> Tensor:
        label, params = self.architecture, (weights or self.weights).params
        module = self.population.modules[label].eval()
        with torch.no_grad():
            return head_outputs(module, self.population.head(label), params, features)

    def head_of(self, weights: Weights) -> dict[str, Tensor]:
        return head_tensors(self.population.head(self.architecture), weights.params)

    def with_head(self, weights: Weights, head: Mapping[str, Tensor]) -> Weights:
        inside = self.population.head(self.architecture)
        new = {f"{inside}.{name}": tensor for name, tensor in head.items()}
        if not new.keys() <= weights.params.keys():
            raise ConfigError(f"'{self.architecture}' has another head than {sorted(head)}")
        return weights._replace(params=weights.params | new)

    def base_of(self, weights: Weights) -> Weights:
        return base_of(self.population.head(self.architecture), weights)

    # Training.

    def sgd(
        self,
        weights: Any,
        objective: Objective,
        *inputs: Any,
        steps: int | None = None,
        rate: float | None = None,
        batches: int = 1,
        stream: int | None = None,
        sample_clip: float | None = None,
    ) -> Any:
        steps = self.steps if steps is None else steps
        rate = self.learning_rate if rate is None else rate
        if stream is None:
            stream, self._streams_used = self._streams_used, self._streams_used + 1
        slot, self._trainings = f"training-{self._trainings}", self._trainings + 1
        if not steps:
            return weights
        single = isinstance(weights, Weights)
        models = {OWN: weights} if single else dict(weights)
        for network, given in models.items():
            self.population.check_weights(self.label(network), given)
        states = self._optimizer_states(slot, models)
        request = Sgd(
            self, models, states, single, objective, inputs, steps, rate, batches, stream,
            sample_clip,
        )  # fmt: skip
        trained: Trained
        (trained,) = self.ask([self._as_asked(request)])
        if self._keeps_optimizer and any(trained.states.values()):
            self.kept = self.kept | {slot: trained.states}
        return trained.models[OWN] if single else trained.models

    def _as_asked(self, request: Sgd) -> Sgd:
        return request

    def facts(self) -> dict[str, float]:
        """The numbers in its state, and what it has spent, for the run directory."""
        counted = {n: t for n, t in self.kept.items() if n == STEPS}
        return {
            name: value.item()
            for name, value in (self.state | counted).items()
            if isinstance(value, Tensor) and value.ndim == 0
        }

    @property
    def _keeps_optimizer(self) -> bool:
        return self.population.training.optimizer_state == "kept" and not self._evaluated

    def _optimizer_states(self, slot: str, models: Mapping[str, Weights]) -> dict[str, Tree]:
        """Those of the same training of the client's last round, where they are kept."""
        kept = self.kept.get(slot, {}) if self._keeps_optimizer else {}
        optimizer = self.population.training.optimizer
        if optimizer.is_plain():
            return {name: {} for name in models}
        return {
            name: kept.get(name) or optimizer.init(self._trained(name, weights))
            for name, weights in models.items()
        }

    def _trained(self, network: str, weights: Weights) -> dict[str, Tensor]:
        """The parameters that training moves."""
        free = free_parameters(self.population.modules[self.label(network)])
        return {name: t for name, t in weights.params.items() if name in free}


@dataclass(frozen=True)
class _Outputs:
    """What networks say about samples of one client, for models that are evaluated."""

    client: EngineClient
    where: Tensor
    count: int
    _answers: dict[Hashable, tuple[Weights, Tensor]] = field(default_factory=dict)
    """What each network has said, and the network, so that no other one gets its id."""

    def __call__(self, weights: Weights, what: What = "logits", network: str = OWN) -> Tensor:
        asked = (id(weights), what, network)
        if asked not in self._answers:
            self.client.population.check_weights(self.client.label(network), weights)
            request = Forward(self.client, weights, self.where, what, network)
            self._answers[asked] = weights, self.client.ask([request])[0]
        return self._answers[asked][1]

    def on(self, features: Tensor, weights: Weights, network: str = OWN) -> Tensor:
        population, label = self.client.population, self.client.label(network)
        population.check_weights(label, weights)
        head = None if network in population.between else population.head(label)
        return on_features(population.modules[label], head, weights, features)


def _same_entries(now: Tree, before: Tree) -> bool:
    return before.keys() == now.keys() and all(before[name] is now[name] for name in now)


def step_keys(requests: Sequence[Sgd]) -> Tensor:
    """The keys of what networks draw in each step, (requests, steps)."""
    device = requests[0].client.population.device
    keys = torch.tensor([request.randomness_key() for request in requests], device=device)
    return random_bits(keys, requests[0].room)


def noise_keys(requests: Sequence[Sgd]) -> Tensor:
    """The keys of the noise of each step, (requests, steps)."""
    device = requests[0].client.population.device
    keys = torch.tensor([request.noise_key() for request in requests], device=device)
    return random_bits(keys, requests[0].room)


def private_draws(request: Sgd, key: int) -> Tensor:
    """Which of its training samples one client's steps see, (steps, batch)."""
    population = request.client.population
    size = population.training.batch_size
    bound, device = population.train_size(request.client.id), population.device
    if not population.training.epochs:
        return uniform_indices(key, (request.steps, size), bound, device)
    return shuffled_indices(key, request.steps * size, bound, device).view(request.steps, size)


def mini_batches(request: Sgd) -> Iterator[tuple[Private | tuple[Private, ...], Public | None]]:
    """What each step of one client's training sees."""
    population = request.client.population
    training, steps = population.training, request.steps
    train = population.positions(request.client.id, "train")

    def drawn(key: int, batch: int, bound: int) -> Tensor:
        return uniform_indices(key, (steps, batch), bound, population.device)

    if request.privacy is not None:
        private: list[Tensor] = [train[request.chosen.which]]
    else:
        private = [train[private_draws(request, key)] for key in request.private_keys()]
    codes = [
        drawn(key, training.batch_size, CODES) if training.augment else None
        for key in request.augmentation_keys()
    ]
    public = None
    if population.algorithm.trains_on_public_set:
        bound = len(population.public_x)
        public = drawn(request.public_key(), training.public_batch_size, bound)

    def batch(where: Tensor, code: Tensor | None) -> Private:
        x = samples_at(population.x, where)
        return Private(
            x if code is None else augmented(x, code, training.augment), population.y[where]
        )

    def taught_on(where: Tensor) -> Public:
        return Public(samples_at(population.public_x, where), where)

    for step in range(steps):
        batches = tuple(
            batch(where[step], None if code is None else code[step])
            for where, code in zip(private, codes, strict=True)
        )
        yield (
            batches if len(batches) > 1 else batches[0],
            None if public is None else taught_on(public[step]),
        )
