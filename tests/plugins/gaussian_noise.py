"""Gaussian noise on what clients send, after a limit on each array's norm.

Running statistics are sent as they are: a variance with noise may be negative, which is none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage, stages


@stages.register("gaussian-noise")
@dataclass(frozen=True)
class GaussianNoise(Stage):
    deviation: float = option(0.01, "standard deviation of the noise on each number", ge=0)
    norm: float = option(0.0, "largest ℓ2 norm of an array before the noise; 0: no limit", ge=0)

    exact = False

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays = {
            name: values if _left_alone(name, values) else self._noisy(name, values, at)
            for name, values in message.arrays.items()
        }
        return Message.from_arrays(arrays), state

    def _noisy(self, name: str, values: Tensor, at: At) -> Tensor:
        if self.norm:
            values = values * (self.norm / values.norm().clamp(min=self.norm))
        noise = torch.from_numpy(at.random(name).standard_normal(tuple(values.shape)))
        return values + self.deviation * noise.to(values)


def _left_alone(name: str, values: Tensor) -> bool:
    return not values.is_floating_point() or "buffers" in "/".join(name.split("/")[:-1])
