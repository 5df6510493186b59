"""The reference engine: one client after another, as plainly as possible.

Every other engine is tested against this one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from perfed.core.algorithm import Network, Objective, Private, Public, trainable
from perfed.core.gradients import Noise, check_sample_gradients, clipped_gradient
from perfed.core.network import outputs
from perfed.core.own_code import objective_with
from perfed.core.pixels import numbers
from perfed.core.randomness import addressed
from perfed.core.tree import Weights
from perfed.engines.base import (
    Forward,
    Job,
    Request,
    Sgd,
    Trained,
    mini_batches,
    noise_keys,
    step_keys,
)
from perfed.engines.local import LocalEngine

EVALUATION_BATCH = 2048
Params = dict[str, dict[str, Tensor]]  # by network, then by name


class SequentialEngine(LocalEngine):
    """Performs one job after another, and answers every request at once."""

    name = "sequential"
    before_step: Callable[[], None] = staticmethod(lambda: None)
    """Called before each training step: whoever owns the engine may raise here, to end it."""

    def perform_jobs(self, jobs: Sequence[Job]) -> list[Any]:
        results = []
        for job in jobs:
            job.client.ask = self.answers
            with job.stream():
                results.append(job.work())
        return results

    def answers(self, requests: Sequence[Request]) -> list[Trained | Tensor]:
        return [self.answer(request) for request in requests]

    def answer(self, request: Request) -> Trained | Tensor:
        with self.precision.active(request.client.population.device):
            if isinstance(request, Sgd):
                return train(request, self.before_step)
            return run_forward(request)


def train(request: Sgd, before_step: Callable[[], None]) -> Trained:
    optimizer = request.client.population.training.optimizer
    modules = _modules(request)
    # What the caller holds stays as it is.
    models = {name: weights.clone() for name, weights in request.models.items()}
    params = {name: trainable(modules[name], weights) for name, weights in models.items()}
    networks = _networks(request, modules, models)
    states = dict(request.states)
    keys = step_keys([request])[0] if request.draws_numbers else repeat(None)
    private_noise = noise_keys([request])[0] if request.privacy is not None else None
    for step, ((private, public), key) in enumerate(zip(mini_batches(request), keys, strict=False)):
        before_step()
        noise = None if private_noise is None else private_noise[step]
        with addressed(key):
            gradients = _gradients(request, networks, params, private, public, step, noise)
        with torch.no_grad():
            for network, own in params.items():
                directions, states[network] = optimizer.update(
                    gradients[network], own, states[network]
                )
                # param -= rate * direction, for all of them: one call is faster than many.
                moves = torch._foreach_mul([directions[name] for name in own], request.rate)
                torch._foreach_sub_([*own.values()], moves)
    return Trained({name: weights.detached() for name, weights in models.items()}, states)


def _gradients(
    request: Sgd,
    networks: Mapping[str, Network],
    params: Params,
    private: Private | tuple[Private, ...],
    public: Public | None,
    step: int,
    noise_key: Tensor | None,
) -> Params:
    """The gradient of the objective on one step's mini-batches."""
    if request.sample_clip is not None:

        def loss_at(objective: Objective, at: Params, one: Private | None) -> Tensor:
            moved = {name: network.with_params(at[name]) for name, network in networks.items()}
            return _loss(request, objective, moved, one, public)

        here = {name: {n: t.detach() for n, t in own.items()} for name, own in params.items()}
        given = (loss_at, request.objective, here, private, request.sample_clip)
        if request.privacy is None or noise_key is None:
            return clipped_gradient(*given)
        noise = Noise(noise_key, request.noise_deviation, request.samples_a_step)
        return clipped_gradient(*given, request.chosen.filled[step], noise)
    loss = _loss(request, request.objective, networks, private, public)
    flat = [param for own in params.values() for param in own.values()]
    found = iter(torch.autograd.grad(loss, flat, materialize_grads=True))
    return {network: {name: next(found) for name in own} for network, own in params.items()}


def _loss(
    request: Sgd,
    objective: Objective,
    networks: Mapping[str, Network],
    private: Any,
    public: Public | None,
) -> Tensor:
    given: Any = next(iter(networks.values())) if request.single else networks
    with objective_with(public):
        return objective(given, private, public, *request.inputs)


def _networks(
    request: Sgd, modules: Mapping[str, torch.nn.Module], models: Mapping[str, Weights]
) -> dict[str, Network]:
    population = request.client.population
    how = population.training.public_batchnorm
    return {
        name: Network(modules[name], models[name], how, population.head(label))
        for name, label in request.labels().items()
    }


def _modules(request: Sgd) -> dict[str, torch.nn.Module]:
    population = request.client.population
    modules = {name: population.modules[label].train() for name, label in request.labels().items()}
    if request.sample_clip is not None:
        check_sample_gradients(modules.values(), request.batches)
        return {name: _by_sample(module) for name, module in modules.items()}
    return modules


def _by_sample(module: torch.nn.Module) -> torch.nn.Module:
    """One that can be mapped over samples: torch's own recurrent layers cannot."""
    if not any(isinstance(layer, torch.nn.RNNBase) for layer in module.modules()):
        return module
    from perfed.engines.stacked.mappable import make_mappable  # whose package imports this module

    copied = copy.deepcopy(module)
    make_mappable(copied)
    return copied


@torch.no_grad()
def run_forward(request: Forward) -> Tensor:
    population = request.client.population
    module, head = population.modules[request.label].eval(), population.head(request.label)
    x = population.public_x if request.where is None else population.x[request.where]
    tensors = request.tensors()
    return torch.cat(
        [
            outputs(module, head, tensors, numbers(batch), request.what)
            for batch in torch.split(x, EVALUATION_BATCH)
        ]
    )
