"""Per-sample gradients, each scaled down to a bound before they are summed; and noise on the sum.

So no single sample can move a step by more than the bound: what differential privacy needs of a
training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from perfed.core.algorithm import Objective, Parts
from perfed.core.errors import ConfigError
from perfed.core.optimizer import TINY
from perfed.core.streams import gaussian, substream

Nested = dict[str, dict[str, Tensor]]  # by network, then by name
Loss = Callable[[Objective, Nested, Any], Tensor]
"""Of an objective, at parameters, on a private mini-batch (or None)."""


class Noise(NamedTuple):
    """What is added to the sum of one step's gradients, and what divides it."""

    key: Tensor
    """Of the step's stream."""
    deviation: float
    samples: int
    """How many a step draws, on average."""


def clipped_gradient(
    loss: Loss,
    objective: Objective,
    params: Nested,
    private: Any,
    bound: float,
    filled: Tensor | None = None,
    noise: Noise | None = None,
) -> Nested:
    """The mean of clip(∇objective of one sample), over the samples of the mini-batch ``private``.

    The norm that is bounded is over all networks together. Of an objective in two parts only the
    private one is clipped. With noise only the places that are ``filled`` count, and the noised sum
    is divided by the average number of them: how many there are is not to be learnt.
    """
    parts = objective if isinstance(objective, Parts) else Parts(objective, _nothing)
    found: Nested = {network: {} for network in params}
    if parts.private is not None:
        found = _clipped_sum(loss, parts.private, params, private, bound, filled)
        if noise is None:
            _divide(found, len(private.y))
        else:
            _add_noise(found, noise)
            _divide(found, noise.samples)
    if parts.public is not _nothing:
        rest = grad(lambda at: loss(parts.public, at, None))(params)
        for network, own in rest.items():
            for name, gradient in own.items():
                found[network][name] = found[network].get(name, 0) + gradient
    return found


def _nothing(*given: Any) -> Tensor:
    raise AssertionError("an objective without a public part is not asked for it")


def _clipped_sum(
    loss: Loss,
    objective: Objective,
    params: Nested,
    private: Any,
    bound: float,
    filled: Tensor | None,
) -> Nested:
    def of_one(at: Nested, x: Tensor, y: Tensor) -> Tensor:
        return loss(objective, at, type(private)(x[None], y[None]))

    of_each = vmap(grad(of_one), in_dims=(None, 0, 0), randomness="different")
    each = of_each(params, private.x, private.y)
    squares = [g.flatten(1).square().sum(1) for own in each.values() for g in own.values()]
    norms = torch.stack(squares).sum(0).sqrt()
    factors = (bound / (norms + TINY)).clamp(max=1.0)
    if filled is not None:
        # A gradient that is not finite would break the sum, and tell that its sample was there.
        counts = filled & norms.isfinite()
        factors = torch.where(counts, factors, 0.0)
        each = {
            network: {
                name: torch.where(counts.view(-1, *[1] * (g.ndim - 1)), g, 0.0)
                for name, g in own.items()
            }
            for network, own in each.items()
        }
    # Networks may compute in bf16. In a sum that is rounded so far, a sample may move it by more
    # than the bound.
    with torch.autocast(factors.device.type, enabled=False):
        return {
            network: {name: torch.tensordot(factors, g, 1) for name, g in own.items()}
            for network, own in each.items()
        }


def _add_noise(sums: Nested, noise: Noise) -> None:
    number = 0
    for own in sums.values():
        for name in sorted(own):
            draws = gaussian(substream(noise.key, number), own[name].shape)
            own[name] = own[name] + noise.deviation * draws.to(own[name].dtype)
            number += 1


def _divide(sums: Nested, count: float) -> None:
    for own in sums.values():
        for name in own:
            own[name] = own[name] / count


def check_sample_gradients(modules: Iterable[nn.Module], batches: int) -> None:
    """Raise where a sample has no gradient of its own."""
    if any(mixes_samples(module) for module in modules):
        raise ConfigError(
            "BatchNorm mixes the samples of a mini-batch: sample_clip needs a network without it, "
            "such as one with GroupNorm",
            "models",
        )
    if batches > 1:
        raise ConfigError("sample_clip takes one private mini-batch a step", "algorithm")


def mixes_samples(module: nn.Module) -> bool:
    """Whether what it says of a sample while it trains, or later, depends on others."""
    return any(
        isinstance(layer, _BatchNorm) or getattr(layer, "track_running_stats", False)
        for layer in module.modules()
    )
