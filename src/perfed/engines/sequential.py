"""The reference engine: one client after another, as plainly as possible.

Every other engine is tested against this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from perfed.core.algorithm import Network, trainable
from perfed.core.tree import Weights
from perfed.engines.base import Job, Logits, Request, Sgd, mini_batches
from perfed.engines.local import LocalEngine

EVALUATION_BATCH = 2048


class SequentialEngine(LocalEngine):
    """Performs one job after another, and answers every request at once."""

    name = "sequential"

    def perform_jobs(self, jobs: Sequence[Job]) -> list[Any]:
        results = []
        for job in jobs:
            job.client.ask = self.answer
            with job.stream():
                results.append(job.work())
        return results

    def answer(self, request: Request) -> Weights | Tensor:
        with self.precision.active(request.client.population.device):
            return train(request) if isinstance(request, Sgd) else logits(request)


def train(request: Sgd) -> Weights:
    population = request.client.population
    module = population.modules[request.client.architecture].train()
    weights = request.weights.clone()  # what the caller holds stays as it is
    params = trainable(module, weights)
    network = Network(module, weights, population.training.public_batchnorm)
    for private, public in mini_batches(request):
        loss = request.objective(network, private, public, *request.inputs)
        gradients = torch.autograd.grad(loss, params, materialize_grads=True)
        with torch.no_grad():
            for param, gradient in zip(params, gradients, strict=True):
                param -= request.rate * gradient
    return Weights(*({n: t.detach() for n, t in part.items()} for part in weights))


@torch.no_grad()
def logits(request: Logits) -> Tensor:
    population = request.client.population
    module = population.modules[request.client.architecture].eval()
    x = population.public_x if request.where is None else population.x[request.where]
    tensors = request.tensors()
    return torch.cat(
        [
            functional_call(module, tensors, (batch,)).to(x.dtype)
            for batch in torch.split(x, EVALUATION_BATCH)
        ]
    )
