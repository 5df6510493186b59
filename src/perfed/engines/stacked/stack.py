"""One stack: a network and its training step as functions of stacked tensors.

``tensor[k]`` is client *k*'s. An algorithm's objective is written for one client;
``torch.func.vmap`` maps it over the stack.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from perfed.core.algorithm import Network, Private, Public, trainable
from perfed.core.errors import ConfigError
from perfed.core.streams import uniform_indices_each
from perfed.core.tree import Weights
from perfed.engines.base import Sgd
from perfed.engines.stacked import hopper
from perfed.engines.stacked.layers import (
    Chain,
    chain_of,
    mapped_chain,
    mapped_chain_of_both,
    matrices,
    with_mappable_batch_norm,
    with_rules,
)


class StackedModule:
    """Copies of a module for training and for evaluation, with the rules for stacks."""

    def __init__(self, module: nn.Module, few: Tensor) -> None:
        self.training = copy.deepcopy(module).train()
        self.evaluating = copy.deepcopy(module).eval()
        self.chains: dict[bool, Chain | None] = {}
        for copied in (self.training, self.evaluating):
            self.chains[copied.training] = chain_of(copied)
            with_mappable_batch_norm(copied)
            if self.chains[copied.training] is None:
                with_rules(copied)
        self.obstacle = self._obstacle(module, few)

    def _obstacle(self, module: nn.Module, x: Tensor) -> str | None:
        """Why the module cannot be mapped, found by trying: two clients against one."""
        buffers = _copied(dict(module.named_buffers()))
        # Not its own weights: where they are zero, differences would not show.
        with torch.random.fork_rng(devices=()):
            params = {
                name: t.detach() + 0.1 * torch.randn(t.shape).to(t)
                for name, t in module.named_parameters()
            }
        two = {name: torch.stack([t, t]) for name, t in (params | buffers).items()}
        try:
            return self._difference(module, params, buffers, two, x)
        except Exception as error:  # whatever a user's module can stumble over
            if "randomness" in str(error):
                return "it draws random numbers, which must come from each client's own stream"
            return str(error).split("\n")[0].split(". ")[0]

    def _difference(
        self,
        module: nn.Module,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        two: dict[str, Tensor],
        x: Tensor,
    ) -> str | None:
        for mode in (True, False):
            forward = vmap(functools.partial(self.forward, mode), in_dims=(0, None))
            plain = functional_call(module.train(mode), params | _copied(buffers), (x,))
            if not _close(forward(_copied(two), x), plain):
                return "mapped over clients it gives other numbers"
        halves = [forward(_copied(two), part) for part in x.chunk(2)]
        if not _close(torch.cat(halves, 1), plain):
            return "in evaluation its output for a sample depends on other samples"
        return None

    def forward(self, training: bool, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """One client's logits; inside ``vmap``."""
        chain = self.chains[training]
        y = None if chain is None else mapped_chain(chain, tensors, x)
        if y is None:
            module = self.training if training else self.evaluating
            y = functional_call(module, tensors, (x,))
        return y.to(x.dtype)

    def evaluate(self, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """One client's logits in evaluation mode."""
        return self.forward(False, tensors, x)


def _close(mapped: Tensor, plain: Tensor) -> bool:
    """By the size of the whole output, and no finer than cuDNN's convolutions, which round to
    eleven bits by default; a module that cannot be mapped is off by far more."""
    return float((mapped - plain).norm()) <= 1e-2 * (float(plain.norm()) + 1e-3)


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in tensors.items()}


class StackedNetwork(Network):
    """The network an objective sees, inside ``vmap``.

    Where it is known that the objective will ask for the logits of one private and one public
    mini-batch, ``together``, both go through the network at once when it asks for the first.
    """

    def __init__(
        self,
        module: StackedModule,
        weights: Weights,
        public_batchnorm: str,
        rounded: dict[str, Tensor],
        asked: list[tuple[str, Tensor]],
        together: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(module.training, weights, public_batchnorm)
        self._stacked = module
        self._rounded = rounded
        self._asked = asked
        self._together = together
        self._logits: tuple[Tensor, Tensor] | None = None

    def at(self, params: dict[str, Tensor]) -> Network:
        buffers = {name: b.clone() for name, b in self._weights.buffers.items()}
        weights = Weights(params, buffers)
        return StackedNetwork(self._stacked, weights, self._public_batchnorm, {}, [])

    def __call__(self, x: Tensor) -> Tensor:
        self._asked.append(("private", x))
        if self._together is not None and x is self._together[0]:
            return self._both()[0].to(x.dtype)
        return super().__call__(x)

    def public(self, x: Tensor) -> Tensor:
        self._asked.append(("public", x))
        if self._together is not None and x is self._together[1]:
            return self._both()[1].to(x.dtype)
        return super().public(x)

    def _both(self) -> tuple[Tensor, Tensor]:
        assert self._together is not None
        if self._logits is None:
            chain = self._stacked.chains[True]
            assert chain is not None
            params, buffers, public_buffers = self._weights
            self._logits = mapped_chain_of_both(
                chain, params | self._rounded, buffers, public_buffers, *self._together
            )
            assert self._logits is not None
        return self._logits

    def _forward(self, x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        return self._stacked.forward(True, self._weights.params | self._rounded | buffers, x)


class Samples(NamedTuple):
    """The samples of all simulations that share a stack, one after another."""

    x: Tensor
    y: Tensor
    public_x: Tensor


@dataclass(frozen=True)
class Draws:
    """Which samples each step of a stack sees; clients first, then steps."""

    private: list[Tensor]
    """Positions in :class:`Samples`, a tensor for each of a step's private mini-batches."""
    public: Tensor | None
    """Numbers within the client's public set."""
    public_start: Tensor
    """Where that set begins in :class:`Samples`, for each client."""

    def all(self) -> list[Tensor]:
        return self.private if self.public is None else [*self.private, self.public]


_TENSOR = object()  # where one of the inputs is a tensor, and not the same for all clients


class StackedStep:
    """One SGD step of a stack of clients, as a function of stacked tensors."""

    def __init__(self, module: StackedModule, first: Sgd) -> None:
        self.module = module
        self._objective = first.objective
        self._batches = first.batches
        self._public_batchnorm = first.client.population.training.public_batchnorm
        leaves, self._form = tree_flatten(first.inputs)
        self._leaves = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        separate = bool(first.weights.public_buffers) or not first.weights.buffers
        self._may_join = separate and first.batches == 1 and module.chains[True] is not None
        self._joins: bool | None = None
        """Whether private and public samples go through the network together; not known yet."""

    def __call__(
        self,
        weights: Weights,
        inputs: list[Tensor],
        samples: Samples,
        private: list[Tensor],
        public: Tensor | None,
        public_start: Tensor,
        rate: Tensor,
    ) -> None:
        """Move ``weights`` in place."""
        if self._joins is None:  # try it on a copy, which tells what the objective asks for
            try:
                self._losses(weights.clone(), {}, inputs, samples, private, public, public_start)
            except RuntimeError as error:
                reason = str(error).split("\n")[0]
                raise ConfigError(
                    f"the objective cannot be mapped over clients, only run one by one: {reason}",
                    "--engine stacked",
                ) from error
        attached = Weights({n: t.detach() for n, t in weights.params.items()}, *weights[1:])
        params = trainable(self.module.training, attached)
        rounded = self._rounded(attached.params)
        losses = self._losses(attached, rounded, inputs, samples, private, public, public_start)
        pairs = [(param, param) for param in params]
        pairs += [(attached.params[name], matrix) for name, matrix in rounded.items()]
        gradients = torch.autograd.grad(losses.sum(), [t for _, t in pairs], allow_unused=True)
        with torch.no_grad():
            for (param, _), gradient in zip(pairs, gradients, strict=True):
                if gradient is not None:
                    hopper.descend(param.detach(), gradient, rate)

    def _losses(
        self,
        weights: Weights,
        rounded: dict[str, Tensor],
        inputs: list[Tensor],
        samples: Samples,
        private: list[Tensor],
        public: Tensor | None,
        public_start: Tensor,
    ) -> Tensor:
        privates = [(samples.x[where], samples.y[where]) for where in private]
        publics: tuple[Tensor, ...] = ()
        if public is not None:
            publics = samples.public_x[public + public_start[:, None]], public
        losses: Tensor = vmap(self._loss_of_one, randomness="error")(
            *weights, rounded, privates, publics, inputs
        )
        return losses

    def _rounded(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        """Under autocast, the matrices as the network uses them. Their gradients are taken in that
        precision, and need not be widened before they meet the weights."""
        chain = self.module.chains[True]
        kind = next((t.device.type for t in params.values()), "cpu")
        if chain is None or not torch.is_autocast_enabled(kind):
            return {}
        dtype = torch.get_autocast_dtype(kind)
        return {
            name: params[name].detach().to(dtype).requires_grad_()
            for name in matrices(chain)
            if params[name].requires_grad
        }

    def _loss_of_one(
        self,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        public_buffers: dict[str, Tensor],
        rounded: dict[str, Tensor],
        privates: list[tuple[Tensor, Tensor]],
        publics: tuple[Tensor, ...],
        inputs: list[Tensor],
    ) -> Tensor:
        asked: list[tuple[str, Tensor]] = []
        batches = tuple(Private(x, y) for x, y in privates)
        together = (batches[0].x, publics[0]) if self._joins else None
        network = StackedNetwork(
            self.module,
            Weights(params, buffers, public_buffers),
            self._public_batchnorm,
            rounded,
            asked,
            together,
        )
        given = iter(inputs)
        leaves = [next(given) if leaf is _TENSOR else leaf for leaf in self._leaves]
        loss = self._objective(
            network,
            batches if self._batches > 1 else batches[0],
            Public(publics[0], publics[1]) if publics else None,
            *tree_unflatten(leaves, self._form),
        )
        if self._joins is None:
            both = {("private", id(batches[0].x)), *(("public", id(x)) for x in publics[:1])}
            found = [(how, id(x)) for how, x in asked]
            self._joins = self._may_join and len(found) == 2 == len(both) and set(found) == both
        return loss


def stack_inputs(stack: Sequence[Sgd]) -> list[Tensor]:
    """The tensors among the objectives' inputs, stacked."""
    columns = zip(*(tree_flatten(request.inputs)[0] for request in stack), strict=True)
    return [torch.stack(column) for column in columns if isinstance(column[0], Tensor)]


def stack_tensors(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([model[name].detach() for model in models]) for name in models[0]}


def stack_weights(models: Sequence[Weights]) -> Weights:
    return Weights(*(stack_tensors(parts) for parts in zip(*models, strict=True)))


def unstack_weights(weights: Weights, count: int) -> list[Weights]:
    """Each client's own tensors: copies, for a view would keep the whole stack in memory."""
    return [
        Weights(*({n: t[k].detach().clone() for n, t in part.items()} for part in weights))
        for k in range(count)
    ]


def draw(stack: Sequence[Sgd], starts: Mapping[int, tuple[int, int]]) -> Draws:
    """What the streams of a stack's clients say. ``starts`` has each population's first sample."""
    first = stack[0]
    population = first.client.population
    training, device = population.training, population.device
    places = [request.client.population for request in stack]
    begins = torch.tensor([starts[id(place)] for place in places], device=device)
    held = [place.positions(r.client.id, "train") for place, r in zip(places, stack, strict=True)]
    sizes = [len(positions) for positions in held]
    table = pad_sequence(held, batch_first=True) + begins[:, :1]
    keys = [request.private_keys() for request in stack]
    private = []
    for number in range(first.batches):
        drawn = uniform_indices_each(
            [key[number] for key in keys], (first.steps, training.batch_size), sizes, device
        )
        private.append(table.gather(1, drawn.flatten(1)).view_as(drawn))
    public = None
    if population.algorithm.trains_on_public_set:
        public = uniform_indices_each(
            [request.public_key() for request in stack],
            (first.steps, training.public_batch_size),
            [len(place.public_x) for place in places],
            device,
        )
    return Draws(private, public, begins[:, 1])
