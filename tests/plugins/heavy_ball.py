"""Momentum as an optimizer of one's own: what ``{name: sgd, momentum: 0.9}`` is."""

from dataclasses import dataclass

import torch

from perfed.core.optimizer import Optimizer
from perfed.core.schema import option


@dataclass(frozen=True)
class HeavyBall(Optimizer):
    momentum: float = option(0.9, "share of the last direction that is kept", ge=0, lt=1)

    def init(self, params):
        return {name: torch.zeros_like(param) for name, param in params.items()}

    def step(self, gradients, params, state):
        after = {name: self.momentum * state[name] + gradients[name] for name in gradients}
        return after, after
