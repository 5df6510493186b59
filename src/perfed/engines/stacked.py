"""All clients of one architecture train as one: a batch of models.

Jobs run together (:mod:`perfed.engines.together`) and their requests are answered in *stacks*:
clients of one architecture that ask for the same thing become one computation over stacked tensors,
in which ``tensor[k]`` is client *k*'s. An algorithm's objective, written for one client, is mapped
over the stack by ``torch.func.vmap``; the layers that matter have faster rules
(:mod:`perfed.engines.layers`). On a GPU the step is recorded and replayed
(:mod:`perfed.engines.recorded`).

What cannot be mapped is answered as the sequential engine would: a module that draws random numbers
(each client's must come from its own stream) or decides by a tensor's value, and an objective that
hides tensors in its closure.
"""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from perfed.core.algorithm import Network, Private, Public, trainable
from perfed.core.streams import uniform_indices_each
from perfed.core.tree import Weights
from perfed.engines.base import Job, Logits, Request, Sgd
from perfed.engines.layers import Chain, chain_of, mapped_chain, with_rules
from perfed.engines.population import Population
from perfed.engines.precision import FLOAT32, Precision
from perfed.engines.sequential import SequentialEngine
from perfed.engines.together import perform_together

JOBS_AT_ONCE = 256
FORWARD_SAMPLES = 4096
"""Samples, over all clients of a stack, that one forward pass sees."""
MOST_LANES = 32

log = logging.getLogger("perfed")


class StackedEngine:
    """Performs jobs together and answers equal requests as one."""

    name = "stacked"

    def __init__(self, precision: Precision = FLOAT32, workers: int = 1) -> None:
        self.precision = precision
        self._workers = workers
        self._sequential = SequentialEngine(precision)
        self._modules: dict[str, StackedModule] = {}

    def perform(self, jobs: Sequence[Job]) -> list[Any]:
        results: list[Any] = []
        with torch.random.fork_rng(_generators(jobs)):
            for job in jobs:  # now: trying a module out may draw random numbers
                self.module_of(job.client.population, job.client.architecture)
            for start in range(0, len(jobs), JOBS_AT_ONCE):
                part = jobs[start : start + JOBS_AT_ONCE]
                streams = JobStreams(part)
                results += perform_together(
                    [functools.partial(self._work, job) for job in part], self._answer, streams.turn
                )
        return results

    def answer(self, request: Request) -> Any:
        return self._answer([request])[0]

    def _work(self, job: Job, ask: Callable[[Request], Any]) -> Any:
        module = self.module_of(job.client.population, job.client.architecture)
        if module.obstacle is not None:
            job.client.ask = self._sequential.answer
        else:
            job.client.ask = functools.partial(self._ask, ask)
        return job.work()

    def _ask(self, ask: Callable[[Request], Any], request: Request) -> Any:
        if isinstance(request, Sgd) and objective_key(request.objective) is None:
            _say_once(
                "an objective with tensors in its closure trains one client at a time: "
                "hand them to client.sgd as inputs instead"
            )
            return self._sequential.answer(request)
        return ask(request)

    def module_of(self, population: Population, architecture: str) -> StackedModule:
        if architecture not in self._modules:
            module = StackedModule(population.modules[architecture], population)
            self._modules[architecture] = module
            if module.obstacle is not None:
                log.warning(
                    "'%s' runs one client at a time, on the sequential engine: %s",
                    architecture,
                    module.obstacle,
                )
        return self._modules[architecture]

    def _answer(self, requests: Sequence[Request]) -> list[Any]:
        answers: dict[int, Any] = {}
        stacks = list(_stacks(requests))
        if self._workers == 1 or len(stacks) == 1:
            parts = [self._answer_stack(stack) for stack in stacks]
        else:
            with ThreadPoolExecutor(self._workers) as pool:
                parts = list(pool.map(self._answer_stack, stacks))
        for stack, part in zip(stacks, parts, strict=True):
            answers |= {id(request): one for request, one in zip(stack, part, strict=True)}
        return [answers[id(request)] for request in requests]

    def _answer_stack(self, stack: Sequence[Request]) -> list[Any]:
        first = stack[0].client
        module = self.module_of(first.population, first.architecture)
        with self.precision.active(first.population.device):
            if isinstance(stack[0], Sgd):
                return train_stack(module, stack)  # type: ignore[arg-type]
            return logits_of_stack(module, stack)  # type: ignore[arg-type]


def _generators(jobs: Sequence[Job]) -> Iterable[int]:
    cuda = any(job.client.population.device.type == "cuda" for job in jobs)
    return range(torch.cuda.device_count()) if cuda else ()


class JobStreams:
    """Torch's global generators as each job left them, so that none moves another's numbers."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._states: dict[int, Tensor] = {}

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        if number in self._states:
            torch.set_rng_state(self._states[number])
            yield
        else:
            torch.manual_seed(self._jobs[number].key())
            yield
        self._states[number] = torch.get_rng_state()


@functools.cache
def _say_once(text: str) -> None:
    log.warning(text)


# Which requests are equal


def _stacks(requests: Sequence[Request]) -> Iterator[list[Request]]:
    groups: dict[Hashable, list[Request]] = {}
    for request in requests:
        groups.setdefault(_kind(request), []).append(request)
    for group in groups.values():
        if isinstance(group[0], Logits):
            yield group
            continue
        for start in range(0, len(group), MOST_LANES):
            yield group[start : start + MOST_LANES]


def _kind(request: Request) -> Hashable:
    """Requests of one kind can be answered as one."""
    client = request.client
    structure = tuple((name, t.shape) for part in request.weights for name, t in part.items())
    kind: tuple[Hashable, ...] = (type(request), client.architecture, structure)
    if isinstance(request, Logits):
        return (*kind, request.public)
    leaves, form = tree_flatten(request.inputs)
    inputs = tuple((t.shape, t.dtype) if isinstance(t, Tensor) else t for t in leaves)
    how = (request.steps, request.rate, request.batches)
    return (*kind, objective_key(request.objective), inputs, str(form), *how)


def objective_key(objective: Any) -> Hashable | None:
    """Equal for objectives that compute the same; None where that cannot be known."""
    if isinstance(objective, functools.partial):
        inner = objective_key(objective.func)
        rest = (*objective.args, *objective.keywords.values())
        values = _value_keys(rest)
        return (inner, tuple(objective.keywords), values) if inner and values is not None else None
    if isinstance(objective, types.MethodType):
        owner = _value_keys([objective.__self__])
        return (objective.__func__, owner) if owner is not None else None
    if isinstance(objective, types.FunctionType):
        cells = [cell.cell_contents for cell in objective.__closure__ or ()]
        values = _value_keys([*cells, *(objective.__defaults__ or ())])
        return (objective.__code__, values) if values is not None else None
    return _value_keys([objective])


def _value_keys(values: Iterable[Any]) -> tuple[Hashable, ...] | None:
    keys = tuple(values)
    if any(isinstance(leaf, Tensor | Weights | dict) for leaf in keys):
        return None
    try:
        hash(keys)
    except TypeError:
        return None
    return keys


# A module, ready for stacks


class StackedModule:
    """Copies of a module for training and for evaluation, with the rules for stacks."""

    def __init__(self, module: nn.Module, population: Population) -> None:
        self.training = copy.deepcopy(module).train()
        self.evaluating = copy.deepcopy(module).eval()
        self.chains: dict[bool, Chain | None] = {}
        for copied in (self.training, self.evaluating):
            self.chains[copied.training] = chain_of(copied)
            if self.chains[copied.training] is None:
                with_rules(copied)
        self.obstacle = self._obstacle(module, population)

    def _obstacle(self, module: nn.Module, population: Population) -> str | None:
        """Why the module cannot be mapped, found by trying: two clients against one."""
        x = population.x[:4]
        tensors = {
            name: t.detach().clone()
            for name, t in (*module.named_parameters(), *module.named_buffers())
        }
        two = {name: torch.stack([t, t]) for name, t in tensors.items()}
        try:
            for mode in (True, False):
                plain = functional_call(module.train(mode), _copied(tensors), (x,))
                mapped = vmap(functools.partial(self.forward, mode), in_dims=(0, None))(
                    _copied(two), x
                )
                if not torch.allclose(mapped, plain.expand_as(mapped), rtol=1e-3, atol=1e-3):
                    return "mapped over clients it gives other numbers"
        except RuntimeError as error:
            if "randomness" in str(error):
                return "it draws random numbers, which must come from each client's own stream"
            return str(error).split("\n")[0].split(". ")[0]
        return None

    def forward(self, training: bool, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        """One client's logits; inside ``vmap``."""
        chain = self.chains[training]
        y = None if chain is None else mapped_chain(chain, tensors, x)
        if y is None:
            module = self.training if training else self.evaluating
            y = functional_call(module, tensors, (x,))
        return y.to(x.dtype)


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in tensors.items()}


class StackedNetwork(Network):
    """The network an objective sees, inside ``vmap``."""

    def __init__(self, module: StackedModule, weights: Weights, public_batchnorm: str) -> None:
        super().__init__(module.training, weights, public_batchnorm)
        self._stacked = module

    def at(self, params: dict[str, Tensor]) -> Network:
        buffers = {name: b.clone() for name, b in self._weights.buffers.items()}
        return StackedNetwork(self._stacked, Weights(params, buffers), self._public_batchnorm)

    def _forward(self, x: Tensor, buffers: dict[str, Tensor]) -> Tensor:
        return self._stacked.forward(True, self._weights.params | buffers, x)


# Training


def train_stack(module: StackedModule, stack: Sequence[Sgd]) -> list[Weights]:
    weights = _stack_weights([request.weights for request in stack])
    step = StackedStep(module, stack, weights)
    for private, public in step.draws():
        losses = step.losses(weights, private, public)
        gradients = torch.autograd.grad(losses.sum(), step.trained, materialize_grads=True)
        torch._foreach_add_(step.trained_data, gradients, alpha=-stack[0].rate)
    return _unstack_weights(weights, len(stack))


class StackedStep:
    """The objective of a stack of clients, as one function of stacked tensors."""

    def __init__(self, module: StackedModule, stack: Sequence[Sgd], weights: Weights) -> None:
        first = stack[0]
        self._stack = stack
        self._module = module
        self._population = first.client.population
        self._objective = first.objective
        self._batches = first.batches
        self.trained = trainable(module.training, weights)
        self.trained_data = [param.detach() for param in self.trained]
        leaves = [tree_flatten(request.inputs)[0] for request in stack]
        self._form = tree_flatten(first.inputs)[1]
        self._inputs = [
            torch.stack(column) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*leaves, strict=True)
        ]

    def draws(self) -> Iterator[tuple[list[Tensor], Tensor | None]]:
        """Each step's positions in the samples, one tensor for each of ``batches``, and in the
        public set."""
        first, population = self._stack[0], self._population
        training, steps = population.training, first.steps
        held = [population.positions(request.client.id, "train") for request in self._stack]
        longest = max(map(len, held))
        table = torch.stack([torch.nn.functional.pad(t, (0, longest - len(t))) for t in held])
        keys = [request.private_keys() for request in self._stack]
        private = []
        for n in range(first.batches):
            drawn = uniform_indices_each(
                [key[n] for key in keys],
                (steps, training.batch_size),
                list(map(len, held)),
                population.device,
            )
            private.append(table.gather(1, drawn.flatten(1)).view_as(drawn))
        public = None
        if population.algorithm.trains_on_public_set:
            public = uniform_indices_each(
                [request.public_key() for request in self._stack],
                (steps, training.public_batch_size),
                [len(population.public_x)] * len(self._stack),
                population.device,
            )
        for step in range(steps):
            yield [t[:, step] for t in private], None if public is None else public[:, step]

    def losses(self, weights: Weights, private: list[Tensor], public: Tensor | None) -> Tensor:
        """One loss for each client."""
        population = self._population
        privates = [(population.x[where], population.y[where]) for where in private]
        publics = () if public is None else (population.public_x[public], public)
        tensors = [t for t in self._inputs if isinstance(t, Tensor)]
        losses: Tensor = vmap(self._loss_of_one, randomness="error")(
            *weights, privates, publics, tensors
        )
        return losses

    def _loss_of_one(
        self,
        params: dict[str, Tensor],
        buffers: dict[str, Tensor],
        public_buffers: dict[str, Tensor],
        privates: list[tuple[Tensor, Tensor]],
        publics: tuple[Tensor, ...],
        tensors: list[Tensor],
    ) -> Tensor:
        network = StackedNetwork(
            self._module,
            Weights(params, buffers, public_buffers),
            self._population.training.public_batchnorm,
        )
        batches = tuple(Private(x, y) for x, y in privates)
        given = iter(tensors)
        leaves = [next(given) if isinstance(t, Tensor) else t for t in self._inputs]
        return self._objective(
            network,
            batches if self._batches > 1 else batches[0],
            Public(*publics) if publics else None,
            *tree_unflatten(leaves, self._form),
        )


def _stack_weights(models: Sequence[Weights]) -> Weights:
    return Weights(
        *(
            {name: torch.stack([part[name].detach() for part in parts]) for name in parts[0]}
            for parts in zip(*models, strict=True)
        )
    )


def _unstack_weights(weights: Weights, count: int) -> list[Weights]:
    """Each client's own tensors: copies, for a view would keep the whole stack in memory."""
    return [
        Weights(*({n: t[k].detach().clone() for n, t in part.items()} for part in weights))
        for k in range(count)
    ]


# Forward


@dataclass
class _Model:
    """A model to run forward, and for whom: clients that share a model are one."""

    tensors: dict[str, Tensor]
    requests: list[Logits]
    where: Tensor


@torch.no_grad()
def logits_of_stack(module: StackedModule, stack: Sequence[Logits]) -> list[Tensor]:
    population = stack[0].client.population
    samples = population.public_x if stack[0].public else population.x
    answers: dict[int, Tensor] = {}
    models = sorted(_distinct_models(stack), key=lambda model: len(model.where))
    for start in range(0, len(models), MOST_LANES):
        lanes = models[start : start + MOST_LANES]
        logits = _forward(module, lanes, samples)
        for model, rows in zip(lanes, logits, strict=True):
            if model.requests[0].public:
                answers |= {id(request): rows for request in model.requests}
                continue
            sizes = [len(request.where) for request in model.requests]  # type: ignore[arg-type]
            pieces = rows[: len(model.where)].split(sizes)
            answers |= {id(r): piece for r, piece in zip(model.requests, pieces, strict=True)}
    return [answers[id(request)] for request in stack]


def _distinct_models(stack: Sequence[Logits]) -> list[_Model]:
    shared: dict[Hashable, list[Logits]] = {}
    for request in stack:
        identity = tuple(t.data_ptr() for t in request.tensors().values())
        shared.setdefault(identity, []).append(request)
    models = []
    for requests in shared.values():
        places = [request.where for request in requests if request.where is not None]
        public = len(requests[0].client.population.public_x)
        where = torch.cat(places) if places else torch.arange(public)
        models.append(_Model(requests[0].tensors(), requests, where))
    return models


def _forward(module: StackedModule, models: Sequence[_Model], samples: Tensor) -> Tensor:
    """(models, longest, classes): each model's logits at its own positions."""
    tensors = {n: torch.stack([model.tensors[n] for model in models]) for n in models[0].tensors}
    longest = max(len(model.where) for model in models)
    where = torch.stack(
        [torch.nn.functional.pad(m.where, (0, longest - len(m.where))) for m in models]
    ).to(samples.device)
    forward = vmap(functools.partial(module.forward, False))
    at_once = max(1, FORWARD_SAMPLES // len(models))
    return torch.cat([forward(tensors, samples[part]) for part in where.split(at_once, 1)], 1)
