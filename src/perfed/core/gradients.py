"""Per-sample gradients, each scaled down to a bound before they are averaged.

So no single sample can move a step by more than the bound: what differential privacy needs of a
training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from perfed.core.errors import ConfigError
from perfed.core.optimizer import TINY

Nested = dict[str, dict[str, Tensor]]  # by network, then by name


def clipped_mean(
    loss: Callable[[Nested, Any], Tensor], params: Nested, private: Any, bound: float
) -> Nested:
    """The mean of clip(∇loss of one sample), over the samples of the mini-batch ``private``.

    ``loss`` gets a mini-batch of one. The norm that is bounded is over all networks together.
    """

    def of_one(at: Nested, x: Tensor, y: Tensor) -> Tensor:
        return loss(at, type(private)(x[None], y[None]))

    of_each = vmap(grad(of_one), in_dims=(None, 0, 0), randomness="different")
    each = of_each(params, private.x, private.y)
    squares = [g.flatten(1).square().sum(1) for own in each.values() for g in own.values()]
    factors = (bound / (torch.stack(squares).sum(0).sqrt() + TINY)).clamp(max=1.0)
    count = len(factors)
    return {
        network: {name: torch.tensordot(factors, g, 1) / count for name, g in own.items()}
        for network, own in each.items()
    }


def check_sample_gradients(modules: Iterable[nn.Module], batches: int) -> None:
    """Raise where a sample has no gradient of its own."""
    if any(isinstance(layer, _BatchNorm) for module in modules for layer in module.modules()):
        raise ConfigError(
            "BatchNorm mixes the samples of a mini-batch: sample_clip needs a network without it",
            "models",
        )
    if batches > 1:
        raise ConfigError("sample_clip takes one private mini-batch a step", "algorithm")
