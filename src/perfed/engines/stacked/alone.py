"""A stack of one client: the network as PyTorch has it, with nothing mapped.

Where the layers of one client keep a core busy, nothing is gained by computing several clients at
once, and caches are lost. What remains of the stacked engine is the tape: a step without Python,
so that the clients of a round share the cores.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from perfed.core.network import head_outputs, outputs
from perfed.core.predictor import What


class LoneModule:
    """What :class:`~.stack.StackedModule` is to several clients, to one."""

    def __init__(self, module: nn.Module, few: Tensor, head: str = "") -> None:
        self.head = head
        self.training = _copy(module).train()
        self.evaluating = _copy(module).eval()
        self.plans: dict[bool, Any] = {True: None, False: None}
        self._channels_last = few.ndim == 4 and _takes_channels_last(self.evaluating, few)

    def outputs(self, training: bool, what: What, tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        module = self.training if training else self.evaluating
        x = channels_last(x) if self._channels_last and x.ndim == 4 else x
        return outputs(module, self.head, tensors, x, what)

    def head_outputs(self, tensors: dict[str, Tensor], features: Tensor) -> Tensor:
        return head_outputs(self.training, self.head, tensors, features)


def channels_last(x: Tensor) -> Tensor:
    """Pictures with their channels last in memory, as convolutions and pooling on a CPU like them.
    The strides say so even where there is one channel, and both orders are one."""
    _, channels, height, width = x.shape
    strides = height * width * channels, 1, width * channels, channels
    return x.contiguous(memory_format=torch.channels_last).as_strided(x.shape, strides)


def _copy(module: nn.Module) -> nn.Module:
    """With the same parameters, for it is always called with others."""
    copied = copy.deepcopy(module, {id(param): param for param in module.parameters()})
    for inside in copied.modules():
        if type(inside) is nn.Sequential:
            _pool_first(inside)
    return copied


def _pool_first(layers: nn.Sequential) -> None:
    """A ReLU before max-pooling has four times the work of one after it; the result is the same,
    and so is the gradient."""
    for before, after in pairwise(list(layers._modules)):
        relu, pool = layers._modules[before], layers._modules[after]
        if type(relu) is not nn.ReLU or type(pool) is not nn.MaxPool2d or pool.return_indices:
            continue
        if not (relu._forward_hooks or pool._forward_hooks):
            layers._modules[before], layers._modules[after] = pool, relu


def _takes_channels_last(module: nn.Module, few: Tensor) -> bool:
    """A module that calls view() may not."""
    if not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    tensors = {name: t.detach().clone() for name, t in module.state_dict().items()}
    try:
        with torch.no_grad(), torch.random.fork_rng([]):
            plain = functional_call(module, tensors, (few,))
            other = functional_call(module, tensors, (channels_last(few),))
    except Exception:  # whatever a user's module can stumble over
        return False
    return bool(torch.allclose(plain, other, rtol=1e-2, atol=1e-3))
