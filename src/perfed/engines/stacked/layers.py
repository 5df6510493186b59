"""The layers that matter, for a stack of models: tensor ``t[k]`` belongs to client *k*.

A rule computes one kind of layer for all clients of a stack at once, ``(n, batch, …) → (n, batch,
…)``. A module made of such layers only runs on its rules alone. In any other module, those layers
that have a rule use it, and PyTorch's own batching rules (``torch.func.vmap``) do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.engines.stacked import hopper
from perfed.engines.stacked.hopper import Deferred
from perfed.engines.stacked.lanes import physical
from perfed.engines.stacked.mappable import unbiasing
from perfed.engines.stacked.operations import (
    PATCHES_LIMIT,
    BatchNorm,
    HalvingMaxPool,
    apply,
    batch_last,
    conv2d_batch_last,
    conv2d_by_columns,
    in_precision,
    max_of_pairs,
    output_size,
)

Rule = Callable[[Any, "Tensors", str, Any], Any]  # (layer, stacked tensors, prefix, input)
Chain = list[tuple[Rule, nn.Module, str]]


@dataclass(frozen=True)
class Tensors:
    """The stacked parameters and buffers of a module, by name.

    Where private and public samples go through it together, the first ``first`` samples are the
    private ones, and the rest has buffers of its own.
    """

    own: Mapping[str, Tensor]
    first: int | None = None
    buffers_of_rest: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.own[name]


def _linear(layer: nn.Linear, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    weight = tensors[at + "weight"]
    rows = x.flatten(1, -2) if x.ndim > 3 else x
    if not x.is_cuda:  # the other way round, for a batch that is last in memory
        y = _product(None if layer.bias is None else tensors[at + "bias"], weight, rows.mT).mT
    elif layer.bias is None:
        y = torch.bmm(rows, weight.mT)
    else:
        y = torch.baddbmm(tensors[at + "bias"].unsqueeze(1), rows, weight.mT)
    return y.reshape(*x.shape[:-1], -1) if x.ndim > 3 else y


def _product(bias: Tensor | None, weight: Tensor, x: Tensor) -> Tensor:
    """(n, o, i) × (n, i, b)."""
    return torch.bmm(weight, x) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, x)


def _elementwise(layer: nn.Module, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


def _relu(layer: nn.ReLU, tensors: Tensors, at: str, x: Tensor | Deferred) -> Tensor | Deferred:
    return x.relu()


def _flatten(layer: nn.Flatten, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    def outside(dim: int) -> int:
        return dim + 1 if dim >= 0 else dim

    return x.flatten(outside(layer.start_dim), outside(layer.end_dim))


def _conv2d(
    layer: nn.Conv2d, tensors: Tensors, at: str, x: Tensor, bias_grad: bool = True
) -> Tensor:
    x, weight = in_precision(x, tensors[at + "weight"])
    bias = None if layer.bias is None else tensors[at + "bias"]
    geometry: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation)
    if hopper.usable(x):
        y = hopper.conv2d(x, weight, bias, geometry, bias_grad=bias_grad)
        if y is not None:
            return y
    if x.is_cuda:
        y = conv2d_by_columns(x, weight, *geometry)
    else:
        rows, columns = output_size(x.shape[3:], weight.shape[3:], geometry)
        if weight[0, 0].numel() * rows * columns <= PATCHES_LIMIT:
            return conv2d_batch_last(x, weight, bias, geometry)
        pairs = zip(x, weight, strict=True)
        y = torch.stack([F.conv2d(image, kernel, None, *geometry) for image, kernel in pairs])
    assert y is not None
    return y if bias is None else y + bias[:, None, :, None, None].to(y.dtype)


def _batch_norm(layer: nn.BatchNorm2d, tensors: Tensors, at: str, x: Tensor) -> Tensor | Deferred:
    n, channels = x.shape[0], x.shape[2]
    weight = tensors[at + "weight"] if layer.affine else _full(x, 1.0)
    bias = tensors[at + "bias"] if layer.affine else _full(x, 0.0)
    tracked = layer.running_mean is not None
    if tracked and not layer.training:
        statistics = tensors[at + "running_mean"], tensors[at + "running_var"]
        if x.ndim == 5 and hopper.usable(x) and not torch.is_grad_enabled():
            return hopper.batch_norm_evaluating(x, weight, bias, *statistics, layer.eps)
        scale = weight * (statistics[1] + layer.eps).rsqrt()
        wide = (n, 1, channels, *(1,) * (x.ndim - 3))
        shift = bias - statistics[0] * scale
        return (x * scale.view(wide) + shift.view(wide)).to(x.dtype)
    running = []
    if tracked:
        owners = [tensors.own] if tensors.first is None else [tensors.own, tensors.buffers_of_rest]
        running = [(own[at + "running_mean"], own[at + "running_var"]) for own in owners]
        for own in owners:
            own[at + "num_batches_tracked"].add_(1)
    first, momentum = tensors.first or x.shape[1], layer.momentum or 0.0
    if x.ndim == 5 and hopper.usable(x):
        return hopper.batch_norm(x, weight, bias, running, momentum, layer.eps, first)
    if tensors.first is None:
        return _normalised(x, weight, bias, running, momentum, layer.eps)
    halves = enumerate(torch.split(x, [first, x.shape[1] - first], 1))
    parts = [
        _normalised(part, weight, bias, running[number : number + 1], momentum, layer.eps)
        for number, part in halves
    ]
    return torch.cat(parts, 1)


def _full(x: Tensor, value: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x.new_full((x.shape[0], x.shape[2]), value, dtype=dtype)


def _normalised(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Sequence[tuple[Tensor, Tensor]],
    momentum: float,
    eps: float,
) -> Tensor:
    """With batch statistics, which move the running ones."""
    n, channels = x.shape[0], x.shape[2]
    unbias = unbiasing(x.numel() // (n * channels))
    if not x.is_cuda and batch_last(x):
        y, mean, variance = _normalised_rows(x, weight, bias, eps)
    else:
        wide = (n, 1, channels, *(1,) * (x.ndim - 3))
        y, mean, variance = apply(BatchNorm, x, weight.reshape(wide), bias.reshape(wide), eps)
    for running_mean, running_variance in running:
        running_mean.lerp_(mean.view(n, channels), momentum)
        running_variance.lerp_((variance * unbias).view(n, channels), momentum)
    normalised: Tensor = y.to(x.dtype)
    return normalised


def _normalised_rows(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the batch is last in memory, a channel of a client is one row, and what BatchNorm does
    to it PyTorch's group norm does in two passes: every row a group of its own."""
    rows = x.movedim(1, -1)
    count = weight.numel()
    y, mean, scale = torch.native_group_norm(
        rows, weight.reshape(-1), bias.reshape(-1), 1, count, x.numel() // count, count, eps
    )
    return y.view(rows.shape).movedim(-1, 1), mean.detach(), scale.detach() ** -2 - eps


def _max_pool2d(layer: nn.MaxPool2d, tensors: Tensors, at: str, x: Tensor | Deferred) -> Tensor:
    halves = _halves(layer) and not (x.shape[-1] % 2 or x.shape[-2] % 2)
    if isinstance(x, Deferred):
        if halves:
            return x.pooled()
        x = x.value()
    if halves:
        if x.is_cuda:
            return max_of_pairs(max_of_pairs(x, -1), -2)
        y: Tensor = apply(HalvingMaxPool, x)
        return y
    pooled: Tensor = layer(x.flatten(0, 1))
    return pooled.reshape(*x.shape[:2], *pooled.shape[1:])


def _halves(layer: nn.MaxPool2d) -> bool:
    def both(value: Any, number: int) -> bool:
        return value in (number, (number, number))

    return (
        both(layer.kernel_size, 2)
        and both(layer.stride, 2)
        and both(layer.padding, 0)
        and both(layer.dilation, 1)
        and not layer.return_indices
    )


def _average_to_one(layer: nn.AdaptiveAvgPool2d, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    return x.mean((-2, -1), keepdim=True)


# Dropout as well: its mask comes from each client's own stream (perfed.core.randomness).
_ELEMENTWISE = (
    nn.Dropout,
    nn.LeakyReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.Identity,
)


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule for exactly this kind of layer; a subclass may do something else."""
    kind = type(layer)
    if kind is nn.Linear:
        return _linear
    if kind is nn.ReLU:
        return _relu
    if kind in _ELEMENTWISE:
        return None if getattr(layer, "inplace", False) else _elementwise
    if kind is nn.Flatten:
        return _flatten if layer.start_dim != 0 else None
    if kind is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
        return _conv2d if not isinstance(layer.padding, str) else None
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.momentum is not None:
        return _batch_norm
    if kind is nn.MaxPool2d and not layer.return_indices:
        return _max_pool2d
    if kind is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1)):
        return _average_to_one
    return None


def chain_of(module: nn.Module) -> Chain | None:
    """The rules that make up the whole of ``module``; None where something in it has no rule, or
    parameters are there twice."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    chain = _links(module, "")
    if chain is None or len(names) > len(list(module.parameters())):
        return None
    for i, ((rule, layer, at), (_, after, _)) in enumerate(pairwise(chain)):
        batch_statistics = getattr(after, "training", False) and isinstance(after, nn.BatchNorm2d)
        if rule is _conv2d and batch_statistics:  # which takes every channel's mean away
            chain[i] = (partial(_conv2d, bias_grad=False), layer, at)
    return chain


def _links(module: nn.Module, prefix: str) -> Chain | None:
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    rule = rule_for(module)
    if rule is not None:
        return [(rule, module, prefix)]
    if type(module) is not nn.Sequential:
        return None
    children = module._modules.items()  # named_children() leaves out what is there twice
    links = [_links(child, f"{prefix}{name}.") for name, child in children if child is not None]
    return [link for part in links for link in part or []] if None not in links else None


def matrices(chain: Chain) -> list[str]:
    """The parameters that are used in matrix products only."""
    return [f"{at}weight" for _, layer, at in chain if isinstance(layer, nn.Conv2d | nn.Linear)]


def run_chain(chain: Chain, tensors: Tensors, x: Tensor) -> Tensor:
    at_work: Tensor | Deferred = x
    for rule, layer, prefix in chain:
        if isinstance(at_work, Deferred) and rule not in (_relu, _max_pool2d):
            at_work = at_work.value()
        at_work = rule(layer, tensors, prefix, at_work)
    return at_work.value() if isinstance(at_work, Deferred) else at_work


def with_rules(module: nn.Module) -> None:
    """Let every layer of ``module`` that has a rule use it where it is mapped over a stack."""
    chain = chain_of(module)
    if chain is not None:
        module.forward = partial(_mapped, module, chain, module.forward)
    else:
        for child in module.children():
            with_rules(child)


def _mapped(
    layer: nn.Module, chain: Chain, otherwise: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    y = mapped_chain(chain, tensors, x)
    return otherwise(x) if y is None else y


def mapped_chain(chain: Chain, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """Inside ``vmap``, the chain for all clients; None where it is not plainly that."""
    stack = physical([x, *tensors.values()])
    if stack is None:
        return None
    with stack.entered():
        named = dict(zip(tensors, stack.tensors[1:], strict=True))
        y = run_chain(chain, Tensors(named), stack.tensors[0])
        if not y.is_cuda:
            y = y.contiguous()  # as PyTorch's layers leave it: what follows may call view()
    return stack.wrap(y)


def mapped_chain_of_both(
    chain: Chain,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    public_buffers: Mapping[str, Tensor],
    private: Tensor,
    public: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Private and public samples in one go, each with their own batch statistics and buffers."""
    stack = physical(
        [private, public, *params.values(), *buffers.values(), *public_buffers.values()]
    )
    if stack is None:
        return None
    with stack.entered():
        private, public, *rest = stack.tensors
        own = dict(zip([*params, *buffers], rest, strict=False))
        other = dict(zip(public_buffers, rest[len(own) :], strict=True))
        if private.is_cuda:
            tensors = Tensors(own, private.shape[1], other)
            y = run_chain(chain, tensors, torch.cat([private, public], 1))
        else:
            apart = _apart(chain)
            halves = [
                run_chain(chain[:apart], Tensors(own), private),
                run_chain(chain[:apart], Tensors(own | other), public),
            ]
            y = run_chain(chain[apart:], Tensors(own), _joined(halves))
        first, second = y[:, : private.shape[1]], y[:, private.shape[1] :]
    return stack.wrap(first), stack.wrap(second)


def _apart(chain: Chain) -> int:
    """How many layers see private and public samples apart on a CPU, which has no use for large
    batches: up to the last BatchNorm, and what makes its output smaller."""
    rules = [rule for rule, _, _ in chain]
    if _batch_norm not in rules:
        return 0
    apart = len(rules) - rules[::-1].index(_batch_norm)
    while apart < len(rules) and rules[apart] in (_relu, _max_pool2d):
        apart += 1
    return apart


def _joined(halves: Sequence[Tensor]) -> Tensor:
    """One batch, last in memory."""
    return torch.cat([half.movedim(1, -1) for half in halves], -1).movedim(-1, 1)
