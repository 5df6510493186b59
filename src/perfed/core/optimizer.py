"""Optimizers: from gradients to the direction of a step.

An optimizer is a value with two pure functions on named tensors of *one* client: ``init`` gives the
state it begins with, ``step`` the direction in which to go and the next state. Engines do the rest:
they move every parameter by −η times its direction, map the functions over many clients at once,
record them, and keep the state where ``training.optimizer_state`` says so. Your own is one file::

    @dataclass(frozen=True)
    class SignSGD(Optimizer):
        def step(self, gradients, params, state):
            return {name: gradient.sign() for name, gradient in gradients.items()}, state

and is named by ``training.optimizer: {name: file.py:SignSGD}``. As in an objective, no ``if`` on a
tensor's value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from perfed.core.errors import ConfigError
from perfed.core.registry import Component, Registry
from perfed.core.schema import option
from perfed.core.tree import Tree

Tensors = Mapping[str, Tensor]
TINY = 1e-12  # a gradient of zeros has no direction to be shortened in


@dataclass(frozen=True)
class Optimizer(Component):
    """Base class of all optimizers. See the module's docstring for the contract."""

    clip: float = option(
        0.0,
        "a network's gradient is scaled down to at most this norm; 0: no limit",
        ge=0,
    )

    registry: ClassVar[Registry[Optimizer]]

    def init(self, params: Tensors) -> Tree:
        """The state before the first step: a tree of tensors."""
        return {}

    def step(self, gradients: Tensors, params: Tensors, state: Tree) -> tuple[Tensors, Tree]:
        """The direction of each parameter (the engine subtracts η times it), and the next state."""
        raise NotImplementedError

    def is_plain(self) -> bool:
        """Whether the direction is the gradient itself."""
        return False

    def update(self, gradients: Tensors, params: Tensors, state: Tree) -> tuple[Tensors, Tree]:
        """What engines call: :meth:`step`, of gradients that are not longer than ``clip``."""
        if self.clip:
            gradients = clipped(gradients, self.clip)
        return self.step(gradients, params, state)


optimizers: Registry[Optimizer] = Registry("optimizer")
Optimizer.registry = optimizers


def clipped(gradients: Tensors, bound: float) -> Tensors:
    """All gradients of a client scaled by one number, so that their norm is at most ``bound``."""
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    factor = (bound / (norm + TINY)).clamp(max=1.0)
    return {name: factor * gradient for name, gradient in gradients.items()}


@optimizers.register("sgd")
@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, with heavy-ball or Nesterov momentum where asked.

    v ← μv + g, and the direction is v, or g + μv with Nesterov; weight decay w adds w·parameter to
    the gradient. So in PyTorch.
    """

    momentum: float = option(0.0, "share μ of the last direction that is kept", ge=0, lt=1)
    nesterov: bool = option(False, "look ahead by one step of momentum")
    weight_decay: float = option(0.0, "pull of every parameter towards zero", ge=0)

    def validate(self) -> None:
        if self.nesterov and not self.momentum:
            raise ConfigError("needs momentum: must be more than 0", "momentum")

    def is_plain(self) -> bool:
        return not (self.momentum or self.weight_decay or self.clip)

    def init(self, params: Tensors) -> Tree:
        if not self.momentum:
            return {}
        return {"velocity": {name: torch.zeros_like(param) for name, param in params.items()}}

    def step(self, gradients: Tensors, params: Tensors, state: Tree) -> tuple[Tensors, Tree]:
        gradients = decayed(gradients, params, self.weight_decay)
        if not self.momentum:
            return gradients, state
        velocity = {
            name: self.momentum * state["velocity"][name] + gradient
            for name, gradient in gradients.items()
        }
        if not self.nesterov:
            return velocity, {"velocity": velocity}
        ahead = {name: gradients[name] + self.momentum * v for name, v in velocity.items()}
        return ahead, {"velocity": velocity}


@optimizers.register("adam")
@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015), with bias correction; weight decay is part of the gradient."""

    beta1: float = option(0.9, "memory of the mean gradient", ge=0, lt=1)
    beta2: float = option(0.999, "memory of the mean squared gradient", ge=0, lt=1)
    epsilon: float = option(1e-8, "what keeps the division finite", gt=0)
    weight_decay: float = option(0.0, "pull of every parameter towards zero", ge=0)

    def init(self, params: Tensors) -> Tree:
        first = next(iter(params.values()))
        zeros = {name: torch.zeros_like(param) for name, param in params.items()}
        # The count is a tensor, as all of the state, so that a recording can move it.
        return {"mean": zeros, "square": dict(zeros), "count": first.new_zeros(())}

    def step(self, gradients: Tensors, params: Tensors, state: Tree) -> tuple[Tensors, Tree]:
        return self.directions(decayed(gradients, params, self.weight_decay), state)

    def directions(self, gradients: Tensors, state: Tree) -> tuple[dict[str, Tensor], Tree]:
        count = state["count"] + 1
        mean = {
            name: torch.lerp(gradient, state["mean"][name], self.beta1)
            for name, gradient in gradients.items()
        }
        square = {
            name: torch.lerp(gradient.square(), state["square"][name], self.beta2)
            for name, gradient in gradients.items()
        }
        whole_mean, whole_square = 1 - self.beta1**count, 1 - self.beta2**count
        directions = {
            name: (m / whole_mean) / ((square[name] / whole_square).sqrt() + self.epsilon)
            for name, m in mean.items()
        }
        return directions, {"mean": mean, "square": square, "count": count}


@optimizers.register("adamw")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay is apart from the gradient (Loshchilov and Hutter 2019)."""

    weight_decay: float = option(0.01, "pull of every parameter towards zero", ge=0)

    def step(self, gradients: Tensors, params: Tensors, state: Tree) -> tuple[Tensors, Tree]:
        directions, state = self.directions(gradients, state)
        return decayed(directions, params, self.weight_decay), state


def decayed(directions: Tensors, params: Tensors, weight_decay: float) -> Tensors:
    """With a pull of each parameter towards zero."""
    if not weight_decay:
        return directions
    return {name: d + weight_decay * params[name] for name, d in directions.items()}
