"""The layers that matter, for a stack of models: tensor ``t[k]`` belongs to client *k*.

A rule computes one kind of layer for all clients of a stack at once, ``(n, batch, …) → (n, batch,
…)``. A module made of such layers only runs on its rules alone (:mod:`.plan`). In any other module,
those parts that have rules use them, and PyTorch's own batching rules (``torch.func.vmap``) do the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.engines.stacked import hopper, hopper_vectors, vendor
from perfed.engines.stacked.attention import attention_of_stack
from perfed.engines.stacked.hopper import Deferred
from perfed.engines.stacked.mappable import unbiasing
from perfed.engines.stacked.operations import (
    PATCHES_LIMIT,
    BatchNorm,
    Chunks,
    HalvingMaxPool,
    apply,
    batch_last,
    conv2d_batch_last,
    in_precision,
    max_of_pairs,
    output_size,
    precision,
)

Rule = Callable[..., Any]  # (layer, stacked tensors, prefix, inputs)


@dataclass(frozen=True)
class Tensors:
    """The stacked parameters and buffers of a module, by name.

    Where private and public samples go through it together, the first ``first`` samples are the
    private ones, and the rest has buffers of its own.
    """

    own: Mapping[str, Tensor]
    first: int | None = None
    buffers_of_rest: Mapping[str, Tensor] = field(default_factory=dict)
    counters: list[Tensor] = field(default_factory=list)
    """Of the batches that BatchNorm layers have seen; one more, in the end."""

    def __getitem__(self, name: str) -> Tensor:
        return self.own[name]


def linear(layer: nn.Linear, tensors: Tensors, at: str, x: Tensor | Deferred) -> Tensor | Deferred:
    weight = tensors[at + "weight"]
    bias = None if layer.bias is None else tensors[at + "bias"]
    if isinstance(x, Deferred):
        x = x.value_in(precision(weight))
    if bias is not None and hopper.available(x):
        narrow, matrix = in_precision(x, weight)
        if hopper_vectors.multiplies(narrow, matrix):
            return hopper_vectors.linear(narrow, matrix, bias)
    if not x.is_cuda and x.ndim == 3:  # the other way round, for a batch that is last in memory
        return _product(bias, weight, x.mT).mT
    rows = x.flatten(1, -2) if x.ndim > 3 else x
    if bias is None:
        y = torch.bmm(rows, weight.mT)
    else:
        y = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    return y.reshape(*x.shape[:-1], -1) if x.ndim > 3 else y


def _product(bias: Tensor | None, weight: Tensor, x: Tensor) -> Tensor:
    """(n, o, i) × (n, i, b)."""
    return torch.bmm(weight, x) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, x)


def _elementwise(layer: nn.Module, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


def _elementwise_copied(layer: nn.Module, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    """A layer that works in place may be given what another still needs."""
    y: Tensor = layer(x.clone())
    return y


def relu(layer: Any, tensors: Tensors, at: str, x: Tensor | Deferred) -> Tensor | Deferred:
    return _rectified(x, 1) or F.relu(_value(x))


def relu6(layer: Any, tensors: Tensors, at: str, x: Tensor | Deferred) -> Tensor | Deferred:
    return _rectified(x, 6) or F.relu6(_value(x))


def gelu(layer: Any, tensors: Tensors, at: str, x: Tensor | Deferred) -> Tensor:
    activated = x.activated() if isinstance(x, Deferred) else None
    return F.gelu(_value(x)) if activated is None else activated


def _rectified(x: Tensor | Deferred, kind: int) -> Deferred | None:
    return x.rectified(kind) if isinstance(x, Deferred) else None


def _value(x: Tensor | Deferred) -> Tensor:
    return x.value() if isinstance(x, Deferred) else x


def add(
    layer: None, tensors: Tensors, at: str, x: Tensor | Deferred, other: Tensor | Deferred
) -> Tensor | Deferred:
    if isinstance(other, Deferred) and (not isinstance(x, Deferred) or x.shared):
        x, other = other, x
    plain = _value(other)
    joined = x.plus(plain) if isinstance(x, Deferred) else None
    return joined or torch.add(*_alike(_value(x), plain))


def _alike(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """With as many dimensions: one client's (d,) goes with its (b, t, d)."""
    dims = max(x.ndim, other.ndim)

    def filled(t: Tensor) -> Tensor:
        return t.view(len(t), *(1,) * (dims - t.ndim), *t.shape[1:]) if t.ndim < dims else t

    return filled(x), filled(other)


def _flatten(layer: nn.Flatten, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    def outside(dim: int) -> int:
        return dim + 1 if dim >= 0 else dim

    return x.flatten(outside(layer.start_dim), outside(layer.end_dim))


def conv2d(
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
        return vendor.conv2d(x, weight, bias, geometry, bias_grad=bias_grad)
    rows, columns = output_size(x.shape[3:], weight.shape[3:], geometry)
    if weight[0, 0].numel() * rows * columns <= PATCHES_LIMIT:
        return conv2d_batch_last(x, weight, bias, geometry)
    pairs = zip(x, weight, strict=True)
    y = torch.stack([F.conv2d(image, kernel, None, *geometry) for image, kernel in pairs])
    return y if bias is None else y + bias[:, None, :, None, None].to(y.dtype)


def _grouped_conv2d(layer: nn.Conv2d, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    """All clients' channels side by side, with as many times the groups."""
    x, weight = in_precision(x, tensors[at + "weight"])
    bias = None if layer.bias is None else tensors[at + "bias"]
    geometry: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation)
    if layer.groups == layer.in_channels == layer.out_channels and hopper.normalises(x):
        return hopper.depthwise(x, weight, bias, geometry)
    if x.is_cuda:
        return vendor.conv2d(x, weight, bias, geometry, layer.groups)
    n, batch = x.shape[:2]
    y = F.conv2d(
        x.transpose(0, 1).flatten(1, 2),
        weight.flatten(0, 1),
        None if bias is None else bias.flatten().to(weight.dtype),
        layer.stride,
        layer.padding,
        layer.dilation,
        n * layer.groups,
    )
    z: Tensor = y.view(batch, n, -1, *y.shape[2:]).transpose(0, 1)
    return z


def _group_norm(layer: nn.GroupNorm, tensors: Tensors, at: str, x: Tensor) -> Tensor | Deferred:
    wide = (x.shape[0], 1, -1, *(1,) * (x.ndim - 3))
    if layer.affine and x.ndim == 5 and hopper.normalises(x):
        weight, bias = tensors[at + "weight"], tensors[at + "bias"]
        return hopper.group_norm(x, weight, bias, layer.num_groups, layer.eps)
    y = F.group_norm(x.flatten(0, 1), layer.num_groups, eps=layer.eps).view(x.shape)
    if not layer.affine:
        return y
    return y * tensors[at + "weight"].view(wide) + tensors[at + "bias"].view(wide)


def layer_norm(
    layer: nn.LayerNorm, tensors: Tensors, at: str, x: Tensor | Deferred
) -> Tensor | Deferred:
    whole = layer.elementwise_affine and layer.bias is not None
    if whole and len(layer.normalized_shape) == 1:
        parameters = tensors[at + "weight"], tensors[at + "bias"], layer.eps
        if isinstance(x, Deferred):
            normed = x.normed(*parameters)
            if normed is not None:
                return normed
        elif hopper_vectors.normalises(x):
            return hopper_vectors.layer_norm(x, *parameters)
    x = _value(x)
    y = F.layer_norm(x, layer.normalized_shape, eps=layer.eps)
    between = x.ndim - 1 - len(layer.normalized_shape)
    wide = (x.shape[0], *(1,) * between, *layer.normalized_shape)
    if layer.elementwise_affine:
        y = y * tensors[at + "weight"].view(wide)
    return y + tensors[at + "bias"].view(wide) if whole else y


def attention(options: Mapping[str, Any], tensors: Tensors, at: str, *parts: Tensor) -> Tensor:
    """Of queries, keys and values."""
    return attention_of_stack(*parts, **options)


def chunk(how: tuple[int, int], tensors: Tensors, at: str, x: Tensor) -> tuple[Tensor, ...]:
    """So many parts, along this dimension."""
    if not x.is_cuda:
        return torch.chunk(x, *how)
    parts: tuple[Tensor, ...] = apply(Chunks, x, *how)
    return parts


def parameter(layer: None, tensors: Tensors, at: str) -> Tensor:
    return tensors[at]


def _by_sample(layer: nn.Module, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    """A layer without parameters that looks at each sample alone."""
    samples = x.flatten(0, 1)
    if isinstance(layer, nn.AvgPool2d):  # on a GPU, its gradient is wrong with channels last
        samples = samples.contiguous()
    y: Tensor = layer(samples)
    return y.reshape(*x.shape[:2], *y.shape[1:])


def batch_norm(layer: nn.BatchNorm2d, tensors: Tensors, at: str, x: Tensor) -> Tensor | Deferred:
    n, channels = x.shape[0], x.shape[2]
    weight = tensors[at + "weight"] if layer.affine else _full(x, 1.0)
    bias = tensors[at + "bias"] if layer.affine else _full(x, 0.0)
    tracked = layer.running_mean is not None
    if tracked and not layer.training:
        statistics = tensors[at + "running_mean"], tensors[at + "running_var"]
        if x.ndim == 5 and hopper.normalises(x) and not torch.is_grad_enabled():
            return hopper.batch_norm_evaluating(x, weight, bias, *statistics, layer.eps)
        scale = weight * (statistics[1] + layer.eps).rsqrt()
        wide = (n, 1, channels, *(1,) * (x.ndim - 3))
        shift = bias - statistics[0] * scale
        return (x * scale.view(wide) + shift.view(wide)).to(x.dtype)
    running = []
    if tracked:
        owners = [tensors.own] if tensors.first is None else [tensors.own, tensors.buffers_of_rest]
        running = [(own[at + "running_mean"], own[at + "running_var"]) for own in owners]
        tensors.counters.extend(own[at + "num_batches_tracked"] for own in owners)
    first, momentum = tensors.first or x.shape[1], layer.momentum or 0.0
    if x.ndim == 5 and hopper.normalises(x):
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


def max_pool2d(layer: nn.MaxPool2d, tensors: Tensors, at: str, x: Tensor | Deferred) -> Tensor:
    halves = _halves(layer) and not (x.shape[-1] % 2 or x.shape[-2] % 2)
    if isinstance(x, Deferred):
        pooled = x.pooled() if halves else None
        if pooled is not None:
            return pooled
        x = x.value()
    if halves:
        if x.is_cuda:
            return max_of_pairs(max_of_pairs(x, -1), -2)
        y: Tensor = apply(HalvingMaxPool, x)
        return y
    if x.ndim == 5 and hopper.usable(x) and not layer.ceil_mode:
        stride = layer.kernel_size if layer.stride is None else layer.stride
        geometry = _pair(stride), _pair(layer.padding), _pair(layer.dilation)
        return hopper.max_pool2d(x, _pair(layer.kernel_size), geometry)
    return _by_sample(layer, tensors, at, x)


def _pair(value: Any) -> tuple[int, int]:
    height, width = (value, value) if isinstance(value, int) else value
    return height, width


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
    nn.SiLU,
    nn.ELU,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Mish,
    nn.Softplus,
    nn.Identity,
)

_BY_SAMPLE = (
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.MaxPool1d,
    nn.MaxPool2d,
)

FUSING = (relu, relu6, gelu, add, max_pool2d, linear, layer_norm)
"""Rules that may share a kernel with the layer before them."""


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule for exactly this kind of layer; a subclass may do something else."""
    kind = type(layer)
    if kind is nn.Linear:
        return linear
    if kind is nn.ReLU:
        return relu
    if kind is nn.ReLU6:
        return relu6
    if kind is nn.GELU:
        return gelu if layer.approximate == "none" else _elementwise
    if kind in _ELEMENTWISE:
        return _elementwise_copied if getattr(layer, "inplace", False) else _elementwise
    if kind is nn.Flatten:
        return _flatten if layer.start_dim != 0 else None
    if kind is nn.Conv2d and layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return conv2d if layer.groups == 1 else _grouped_conv2d
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.momentum is not None:
        return batch_norm
    if kind is nn.GroupNorm:
        return _group_norm
    if kind is nn.LayerNorm:
        return layer_norm
    if kind is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1)):
        return _average_to_one
    if kind in _BY_SAMPLE and not getattr(layer, "return_indices", False):
        return max_pool2d if kind is nn.MaxPool2d else _by_sample
    return None
