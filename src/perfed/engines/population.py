"""The clients of one simulation: their data, their networks, and what they keep."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from perfed.config import Training
from perfed.core.accounting import Spending
from perfed.core.admission import check
from perfed.core.algorithm import Algorithm, Predictor
from perfed.core.declaration import Known, shares_heads
from perfed.core.errors import ConfigError, did_you_mean, shape_text
from perfed.core.gradients import mixes_samples
from perfed.core.hostile import Attack, Attacker, honest_ones
from perfed.core.inputs import Inputs
from perfed.core.message import Message
from perfed.core.metrics import EVALUATED_ON, Samples, column_name, evaluate
from perfed.core.network import Between
from perfed.core.own_code import running, wrong_return
from perfed.core.participation import Participation
from perfed.core.pixels import numbers
from perfed.core.privacy import Account, Privacy, sampling_rate, told_number
from perfed.core.randomness import draws_numbers
from perfed.core.schema import plain
from perfed.core.streams import numpy_stream, stream_key
from perfed.core.tree import OWN, Weights, find_not_finite
from perfed.core.wire import Link
from perfed.data import Federation
from perfed.engines.base import Call, ClientRecord, Engine, EngineClient, Job, Method
from perfed.engines.speaker import Speaker
from perfed.engines.store import ClientStore
from perfed.engines.window import Window
from perfed.engines.work import forward_flops
from perfed.models import (
    Architecture,
    Models,
    architectures,
    build_module,
    check_trains_on_one,
    find_head,
    initial_weights,
    inputs_for,
)


class Purse(Protocol):
    """A site's own account of its privacy, over all that it takes part in."""

    secret: int
    told: int
    telling: Spending
    """What it cost to tell that number."""
    spent: list[Spending]

    def spend(self, spending: Spending) -> None:
        """Write down a training before it begins."""


LARGE_STEP = 100e6
"""Floating-point operations of one client's training step from which its layers keep a core busy:
they then run one client at a time, and gain from further threads."""


class Population:
    """All clients of one simulation, whichever engine runs them."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        models: Models,
        training: Training,
        rounds: int,
        seed: int,
        device: torch.device,
        store: ClientStore | None = None,
        link: Link | None = None,
        trusts_server: bool = True,
        attack: Attack | None = None,
        privacy: Privacy | None = None,
        purse: Purse | None = None,
        participation: Participation | None = None,
    ) -> None:
        """``purse`` is a site's own account of its privacy; in a simulation clients count for
        themselves, and what hides samples follows from the seed, so that it can be repeated."""
        self.algorithm = algorithm
        self.federation = federation
        self.training = training
        self.rounds = rounds
        self.seed = seed
        self.device = device
        self.link = link or Link(seed=seed)
        self._trusts_server = trusts_server
        self.attack = attack
        """What hostile clients do; who they are is said in the federation's facts."""
        self._honest = honest_ones(federation.partition_facts, federation.clients)
        self.participation = participation or Participation()
        self._messages = algorithm.messages()
        silent = self._messages.up == {}
        self.privacy = None if silent else privacy  # who is silent needs none
        self._stays_silent = silent and privacy is not None
        self.purse = purse
        self.secret = stream_key(seed, "secret") if purse is None else purse.secret
        self.engine: Engine
        """Set by whoever runs these clients."""
        self.assignment = models
        self._tasks: dict[str, tuple[Callable[[Any, Message], Any], str]] = {
            "first_message": (self._first_message, "module"),
            "client_round": (self._client_round, "module"),
            "models": (self._models, "evaluated-module"),
            "evaluate": (self._evaluate, "evaluated-module"),
        }
        dealt = models.positions(federation.train_sizes, seed)
        used = [models.architectures[position] for position in dict.fromkeys(dealt.tolist())]
        labels = {architecture: architecture.label() for architecture in used}
        by_position = [labels.get(architecture, "") for architecture in models.architectures]
        self.architectures = [by_position[position] for position in dealt.tolist()]
        self._own_initial = models.initial == "own"
        self.by_label = {label: architecture for architecture, label in labels.items()}
        self.extra = named_networks(algorithm, self.by_label)
        self.second_models = {n for n, network in algorithm.networks().items() if network == OWN}
        """Names of further models of a client's own network."""
        networks = self.by_label | self.extra
        self.inputs = inputs_for(networks.values(), federation.inputs)
        self.classes = federation.samples.classes
        self._shapes = {
            label: (architecture, self.inputs, self.classes)
            for label, architecture in networks.items()
        }
        """How each network is built: what it takes, and how many numbers it gives."""
        self.modules = {label: build_module(*how).to(device) for label, how in self._shapes.items()}
        self._check_batches()
        self._check_augmentation()
        self._check_privacy()
        self._heads: dict[str, tuple[str, int]] = {}
        self._draws_numbers: dict[str, bool] = {}
        self._forward_flops: dict[str, int] = {}
        if algorithm.needs_features:
            self._find_heads()
        self.between = networks_between(algorithm)
        self._between_of: dict[str, str] = {}
        """The architecture of the clients that have it, by the label of a network between."""
        self._build_between()
        self._initial: dict[tuple[str, int], Weights] = {}
        self._window = None if federation.distant is None else Window(federation, device)
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
                check_trains_on_one(label, module, self.inputs, where)

    def _check_augmentation(self) -> None:
        inputs = self.inputs
        if self.training.augment and (inputs.tokens or len(inputs.shape) != 3):
            raise ConfigError(
                f"needs images, channels×height×width; these samples are {inputs}: must be empty",
                "training.augment",
            )

    def _check_privacy(self) -> None:
        for label, module in self.modules.items() if self.privacy is not None else ():
            if mixes_samples(module):
                raise ConfigError(
                    f"'{label}' has BatchNorm, which mixes the samples of a mini-batch: privacy "
                    "needs a network without it, such as one with GroupNorm",
                    "models",
                )

    def told_size(self, client: int) -> int:
        """How many training samples a client says it has."""
        size = self._hidden_size(client)
        return size if self.attack is None or self._honest[client] else self.attack.told(size)

    def _hidden_size(self, client: int) -> int:
        if self.privacy is None:
            return self.train_size(client)
        if self.purse is not None:
            return self.purse.told
        draw = numpy_stream(self.secret, "told samples", client).standard_normal()
        return told_number(self.train_size(client), self.privacy, draw)

    def account(self, client: int) -> Account:
        """What a client may spend on messages that hide its samples."""
        assert self.privacy is not None
        rate = sampling_rate(self.training.batch_size, self.told_size(client))
        if self.purse is None:
            return Account(self.privacy, rate)
        return Account(self.privacy, rate, tuple(self.purse.spent), self.purse.telling)

    def epsilon(self, client: int, steps: int) -> float:
        """What a client has spent after so many noised steps."""
        return 0.0 if self.privacy is None else self.account(client).epsilon(steps)

    def _find_heads(self) -> None:
        """The last layer of each network, and the width of what goes into it."""
        for label, architecture in (self.by_label | self.extra).items():
            self._heads[label] = find_head(architecture, self.modules[label], self.inputs)
        check_one_width(self.algorithm, {label: self.width(label) for label in self.by_label})
        heads = {n: self.modules[n].get_submodule(self.head(n)) for n in self.by_label}
        check_one_head(self.algorithm, heads)

    def _build_between(self) -> None:
        """Networks that take features, one for each architecture of clients."""
        for name, between in self.between.items():
            for own in self.by_label:
                label = self.named(name, own)
                self._between_of[label] = own
                self._shapes[label] = sized(between, partial(self._width_of, own))
                self.modules[label] = build_module(*self._shapes[label]).to(self.device)

    def _width_of(self, own: str, network: str) -> int:
        label = own if network == OWN else self.named(network, own)
        if not self.width(label):
            raise ConfigError(
                "an algorithm with a network between features must say so: needs_features = True",
                "algorithm",
            )
        return self.width(label)

    @cached_property
    def most_steps(self) -> int:
        """Training steps a round of the client that makes most of them."""
        sizes = self.federation.train_sizes
        return self.training.steps_of(int(max(sizes))) if len(sizes) else 0

    @property
    def uneven(self) -> bool:
        """Whether clients make different numbers of training steps in a round."""
        return self.training.epochs > 0 or self.participation.stragglers > 0

    def named(self, network: str, own: str) -> str:
        """The label of a network beside the own one of a client."""
        if network in self.between:
            return f"{network} of {own}"
        if network not in self.extra:
            raise ConfigError(
                f"'{self.algorithm.registered_name}' has no network '{network}'"
                + did_you_mean(network, [OWN, *self.second_models, *self.extra, *self.between]),
                "algorithm",
            )
        return network

    def networks_of(self, client: int) -> dict[str, tuple[Architecture, Inputs, int]]:
        """How each network of a client is built, by the name that the algorithm has for it: what it
        is, what it takes, and how many numbers it gives."""
        own = self.architectures[client]
        labels = {OWN: own} | {name: self.named(name, own) for name in [*self.extra, *self.between]}
        return {name: self._shapes[label] for name, label in labels.items()}

    def head(self, label: str) -> str:
        """The name of a network's last layer; empty where the algorithm does not look at it."""
        return self._heads.get(label, ("", 0))[0]

    def width(self, label: str) -> int:
        """How many features a network gives; 0 where the algorithm does not look at them."""
        return self._heads.get(label, ("", 0))[1]

    def draws_numbers(self, label: str) -> bool:
        """Whether a network draws random numbers while it trains."""
        if label not in self._draws_numbers:
            self._draws_numbers[label] = draws_numbers(self.modules[label], self.few(label))
        return self._draws_numbers[label]

    def few(self, label: str) -> Tensor:
        """A few samples, or features, to try a network with."""
        inputs = self._shapes[label][1]
        if inputs is self.inputs:
            return numbers(self.x[:4])
        values = torch.linspace(-1, 1, 4 * inputs.shape[0], device=self.device)
        return values.view(4, *inputs.shape)

    def holders(self, label: str) -> int:
        """How many clients may have such a network: one beside their own may be anybody's."""
        if label in self.extra:
            return len(self.architectures)
        return self.architectures.count(self._between_of.get(label, label))

    def is_large(self, labels: Iterable[str]) -> bool:
        """Whether a client's training step with these networks keeps a core busy."""
        return any(self.step_flops(label) >= LARGE_STEP for label in labels)

    def step_flops(self, label: str) -> int:
        """Of one client's training step: backward is about twice forward."""
        samples = self.training.batch_size
        if self.algorithm.trains_on_public_set:
            samples += self.training.public_batch_size
        return 3 * samples * self.forward_flops(label)

    def forward_flops(self, label: str) -> int:
        """Of one sample."""
        if label not in self._forward_flops:
            one = self._shapes[label][1].zeros(1, self.device)
            self._forward_flops[label] = forward_flops(self.modules[label], one)
        return self._forward_flops[label]

    # Samples go to the device when they are first used: where clients live elsewhere, never. These
    # are tables, which keep pictures as bytes: ``samples_at`` gives rows as networks get them.

    # Where they are never all in memory, they are those of the clients of the newest call.

    @property
    def x(self) -> Tensor:
        return self._all_x if self._window is None else self._window.x

    @property
    def y(self) -> Tensor:
        return self._all_y if self._window is None else self._window.y

    @property
    def has_all_samples(self) -> bool:
        """Whether ``x`` has the samples of all clients, and stays as it is."""
        return self._window is None

    @cached_property
    def _all_x(self) -> Tensor:
        samples = self.federation.samples
        return self.inputs.table(samples.x, samples.pixels, self.device)

    @cached_property
    def _all_y(self) -> Tensor:
        return torch.as_tensor(self.federation.samples.y, device=self.device)

    @cached_property
    def public_x(self) -> Tensor:
        samples = self.federation.samples
        return self.inputs.table(samples.public_x, samples.pixels, self.device)

    def call(self, method: Method, messages: Mapping[int, Message], round: int) -> Call:
        return Call(self, method, messages, round)

    def jobs(self, call: Call) -> list[Job]:
        """One job for each message."""
        task, purpose = self._tasks[call.method]
        if self._window is not None:
            self._window.bring(call.messages)
        jobs = []
        for number, message in call.messages.items():
            client = self.client(number, call.round, evaluated=purpose != "module")
            jobs.append(Job(client, partial(task, client, message), purpose))
        return jobs

    def commit(self, records: Mapping[int, ClientRecord]) -> None:
        self.records.update(records)

    def models(self, client: int, message: Message, round: int) -> dict[str, Predictor]:
        """The models of ``client`` that the algorithm wants evaluated."""
        (models,) = self.engine.perform([self.call("models", {client: message}, round)])
        of_client: dict[str, Predictor] = models[client]
        return of_client

    def evaluate(
        self, messages: Mapping[int, Message], round: int
    ) -> dict[str, dict[str, np.ndarray]]:
        """Per model kind, one number per client: ``{"personal": {"test_accuracy": …}}``."""
        columns: dict[str, dict[str, np.ndarray]]
        (columns,) = self.engine.perform([self.call("evaluate", messages, round)])
        return columns

    # The client's half of the wire is around what the algorithm does there.

    def _first_message(self, client: EngineClient, message: Message) -> Message | None:
        if not self._trusts_server:
            check(message, {}, self.known(client.id))
        speaking = client if self.privacy is None else Speaker(client, opening=True)
        with running(self.algorithm, "first_message"):
            first = self.algorithm.first_message(speaking)
        return None if first is None else self._sent(client, message, first, "first_message")

    def _client_round(self, client: EngineClient, message: Message) -> Message | None:
        state, declared = client.kept.get("link", {}), self._messages.down
        received, kept = self.link.receive(
            message, client.id, client.round, "down", state, declared, self.known(client.id)
        )
        if not self._trusts_server:
            check(received, declared, self.known(client.id))
        if kept is not state:
            client.kept["link"] = kept
        with running(self.algorithm, "client_round"):
            reply = self.algorithm.client_round(client, received)
        client.check_kept()
        if self.privacy is not None:  # what was just written is of what stays at home
            speaker = Speaker(client)
            with running(self.algorithm, "speak"):
                reply = self.algorithm.speak(speaker, received)
            speaker.leave()
        return self._sent(client, received, reply, "client_round")

    def _sent(
        self, client: EngineClient, received: Message, written: Any, method: str
    ) -> Message | None:
        if not isinstance(written, Message):
            raise wrong_return(self.algorithm, method, written)
        if self._stays_silent and written.arrays:
            raise ConfigError(
                f"'{self.algorithm.registered_name}' declares that its clients send nothing, and "
                f"sends '{next(iter(written.arrays))}', which no noise covers",
                "algorithm",
            )
        message: Message | None = written
        if self.attack is not None and not self._honest[client.id]:
            who = Attacker(self.seed, client.id, client.round, self.known(client.id, received))
            message = self.attack.message(written, self._messages.up, who)
        if message is None:
            return None
        if self.link.stages and find_not_finite({0: [*message.arrays.items()]}):
            return message  # as it is: whoever gets the outcome sees that it is broken
        state, known = client.kept.get("link", {}), self.known(client.id, received)
        sent, kept = self.link.send(
            message, client.id, client.round, "up", state, self._messages.up, known
        )
        if kept is not state:
            client.kept["link"] = kept
        return sent

    def _models(self, client: EngineClient, message: Message) -> dict[str, Predictor]:
        declared = self._messages.evaluation
        received, _ = self.link.receive(
            message, client.id, client.round, "evaluation", {}, declared, self.known(client.id)
        )
        if not self._trusts_server:
            check(received, declared, self.known(client.id))
        with running(self.algorithm, "models"):
            models = self.algorithm.models(client, received)
        if not isinstance(models, Mapping) or not models.keys() & {"personal", "global"}:
            raise wrong_return(self.algorithm, "models", models)
        return dict(models)

    def known(self, client: int, received: Message | None = None) -> Known:
        """By what a client's messages are measured."""
        own = self.architectures[client]
        sizes = {"P": len(self.federation.samples.public_x), "N": self.classes}
        sizes |= {"F": self.width(own)} if self._heads else {}
        return Known(
            sizes,
            self.told_size(client),
            lambda network: self.initial_weights(network or own),
            lambda network: self.head(network or own),
            Message() if received is None else received,
        )

    def _evaluate(self, client: EngineClient, message: Message) -> dict[str, Tensor]:
        """By model kind, the logits of all samples that one client is evaluated on."""
        models = self._models(client, message)
        where = self._on_device(self._evaluated_on(client.id))
        return {kind: client.said(model, where) for kind, model in models.items()}

    def measured(
        self, clients: Iterable[int], logits: Sequence[Mapping[str, Tensor]]
    ) -> dict[str, dict[str, np.ndarray]]:
        """One column for each metric of each model kind; from the device in one piece."""
        places = [where for client in clients for where in self._evaluated_on(client)]
        labels, sizes = self.y[self._on_device(places)], [len(where) for where in places]
        columns: dict[str, dict[str, np.ndarray]] = {}
        for kind in logits[0]:
            numbers = evaluate(Samples(torch.cat([one[kind] for one in logits]), labels, sizes))
            table = torch.stack([*numbers.values()]).view(len(numbers), -1, len(EVALUATED_ON))
            columns[kind] = {
                column_name(part, name): column
                for name, by_client in zip(numbers, table.cpu().numpy(), strict=True)
                for part, column in zip(EVALUATED_ON, by_client.T, strict=True)
            }
        return columns

    def record(self, client: int) -> ClientRecord:
        return self.records.get(client) or ClientRecord(self.first_weights(client))

    def client(self, client: int, round: int, evaluated: bool = False) -> EngineClient:
        """One client, in one round; ``evaluated`` where its models are only evaluated."""
        return EngineClient(self, client, round, evaluated)

    def first_weights(self, client: int) -> Weights:
        """What a client's own model begins with."""
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
        initial = initial_weights(*self._shapes[architecture], self.seed, client, number)
        weights = with_public_statistics(initial, self.algorithm, self.training).clone()
        return Weights(*({n: t.to(self.device) for n, t in part.items()} for part in weights))

    def check_weights(self, label: str, weights: Any) -> None:
        """Weights that an algorithm hands to an engine are those of the network, by names and
        shapes: engines would make different things of others."""
        name = self.algorithm.registered_name
        if not isinstance(weights, Weights):
            raise ConfigError(f"'{name}' gives {type(weights).__name__}: must be perfed.Weights")
        expected = self.initial_weights(label)
        public = expected.public_buffers if weights.public_buffers else {}
        for must, found in zip((*expected[:2], public), weights, strict=True):
            if must.keys() != found.keys():
                missing = [f"without '{n}'" for n in must if n not in found]
                extra = [f"with an unknown '{n}'" for n in found if n not in must]
                raise ConfigError(f"'{name}' gives weights of '{label}' {(missing + extra)[0]}")
            for part, tensor in found.items():
                if tensor.shape != must[part].shape:
                    is_, be = shape_text(tensor.shape), shape_text(must[part].shape)
                    raise ConfigError(
                        f"'{name}' gives weights of '{label}' whose '{part}' is {is_}: must be {be}"
                    )

    def positions(self, client: int, part: str) -> Tensor:
        """Where those of a client's ``train`` or ``validation`` samples are in ``x`` that an
        algorithm may look at."""
        return torch.as_tensor(self.places(client, part), device=self.device)

    def places(self, client: int, part: str) -> np.ndarray:
        """The same, as an array."""
        return self._in_x(client, self.federation.seen(client, part))

    def _evaluated_on(self, client: int) -> list[np.ndarray]:
        """The same of those samples of each part that it is evaluated on."""
        return [self._in_x(client, self.federation.evaluated(client, p)) for p in EVALUATED_ON]

    def _on_device(self, places: Sequence[np.ndarray]) -> Tensor:
        """All of them, in one piece."""
        return torch.as_tensor(np.concatenate(places), device=self.device)

    def _in_x(self, client: int, where: np.ndarray) -> np.ndarray:
        return where if self._window is None else where + self._window.first(client)

    def train_size(self, client: int) -> int:
        return int(self.federation.train_sizes[client])


def with_public_statistics(weights: Weights, algorithm: Algorithm, training: Training) -> Weights:
    """With BatchNorm statistics of public batches, where those have their own: as yet the same."""
    separate = algorithm.trains_on_public_set and training.public_batchnorm == "separate"
    return weights._replace(public_buffers=weights.buffers if separate else {})


def check_one_width(algorithm: Algorithm, widths: Mapping[str, int]) -> None:
    """Raise where clients' features meet and their networks give different numbers of them."""
    if algorithm.shares_features and len(set(widths.values())) > 1:
        each = ", ".join(f"'{label}' {width}" for label, width in widths.items())
        raise ConfigError(
            f"'{algorithm.registered_name}' compares features of different clients, and their "
            f"networks have different widths ({each}): must be one width",
            "models",
        )


def check_one_head(algorithm: Algorithm, heads: Mapping[str, nn.Module]) -> None:
    """Raise where clients get one head for all and theirs are not alike: of one width, one may have
    a bias and another none."""
    if not shares_heads(algorithm.messages()):
        return
    shapes = {
        label: ", ".join(f"{n} {shape_text(t.shape)}" for n, t in sorted(head.named_parameters()))
        for label, head in heads.items()
    }
    if len(set(shapes.values())) > 1:
        each = "; ".join(f"'{label}' {shape}" for label, shape in shapes.items())
        raise ConfigError(
            f"'{algorithm.registered_name}' has one head for all clients, and the last layers of "
            f"their networks differ ({each}): must be alike",
            "models",
        )


def named_networks(algorithm: Algorithm, labels: Container[str]) -> dict[str, Architecture]:
    """The networks an algorithm has beside the clients' own, whose labels are given, and which
    take samples."""
    networks: dict[str, Architecture] = {}
    for name, architecture in algorithm.networks().items():
        if name == OWN or name in labels:
            raise ConfigError(f"'{name}' is the name of a client's network: choose another")
        if architecture != OWN and not isinstance(architecture, Between):
            networks[name] = architectures.build(plain(architecture))
    return networks


def networks_between(algorithm: Algorithm) -> dict[str, Between]:
    """Those that take features."""
    found = algorithm.networks().items()
    return {name: network for name, network in found if isinstance(network, Between)}


def sized(between: Between, width: Callable[[str], int]) -> tuple[Architecture, Inputs, int]:
    """How a network between others is built, by the width of each of these."""
    taken = sum(width(network) for network in between.takes)
    architecture = architectures.build(plain(between.architecture))
    return architecture, Inputs((taken,)), width(between.gives)


def changed_records(jobs: Sequence[Job]) -> dict[int, ClientRecord]:
    """What those clients now hold that have something new to keep."""
    return {job.client.id: job.client.record() for job in jobs if job.client.changed()}
