"""The layers that matter, for a stack of models: tensor ``t[k]`` belongs to client *k*.

A rule computes one kind of layer for all clients of a stack at once, ``(n, batch, …) → (n, batch,
…)``. A module made of such layers only runs on its rules alone. In any other module, those layers
that have a rule use it, and PyTorch's own batching rules (``torch.func.vmap``) do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.engines import hopper
from perfed.engines.hopper import Deferred
from perfed.engines.lanes import physical

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
    if layer.bias is None:
        y = torch.bmm(rows, weight.mT)
    else:
        y = torch.baddbmm(tensors[at + "bias"].unsqueeze(1), rows, weight.mT)
    return y.reshape(*x.shape[:-1], -1) if x.ndim > 3 else y


def _elementwise(layer: nn.Module, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    y: Tensor = layer(x)
    return y


def _relu(layer: nn.ReLU, tensors: Tensors, at: str, x: Tensor | Deferred) -> Tensor | Deferred:
    return x.relu()


def _flatten(layer: nn.Flatten, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    def outside(dim: int) -> int:
        return dim + 1 if dim >= 0 else dim

    return x.flatten(outside(layer.start_dim), outside(layer.end_dim))


DENSE_LIMIT = 1 << 16
"""Entries up to which a convolution is written as one dense matrix: tiny images, on a CPU."""


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
        places, shape = dense_places(tuple(x.shape[2:]), tuple(weight.shape[1:]), geometry)
        if places is not None:
            y = _apply(DenseConvolution, x.flatten(2), weight, places, shape)
        else:
            pairs = zip(x, weight, strict=True)
            y = torch.stack([F.conv2d(image, kernel, None, *geometry) for image, kernel in pairs])
    assert y is not None
    return y if bias is None else y + bias[:, None, :, None, None].to(y.dtype)


def in_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What PyTorch's own layers do to their inputs under ``torch.autocast``."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(tensor.to(torch.get_autocast_dtype(kind)) for tensor in tensors)


@lru_cache(maxsize=64)
def dense_places(
    image: tuple[int, ...], kernel: tuple[int, ...], geometry: tuple[Any, ...]
) -> tuple[Tensor | None, tuple[int, ...]]:
    """Where each weight of a convolution stands in its dense matrix, and the output's shape.

    The matrix (inputs × outputs) comes flat, with one entry more for what falls off the image.
    None where it would be larger than ``DENSE_LIMIT``.
    """
    (channels, height, width), (stride, padding, dilation) = image, geometry
    rows, columns = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(
            (height, width), kernel[2:], stride, padding, dilation, strict=True
        )
    )
    shape = (kernel[0], rows, columns)
    inputs, outputs = channels * height * width, kernel[0] * rows * columns
    if inputs * outputs > DENSE_LIMIT:
        return None, shape
    o, c, u, v, i, j = torch.meshgrid(
        *(torch.arange(size) for size in (*kernel, rows, columns)), indexing="ij"
    )
    row = i * stride[0] - padding[0] + u * dilation[0]
    column = j * stride[1] - padding[1] + v * dilation[1]
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source, target = (c * height + row) * width + column, (o * rows + i) * columns + j
    places = torch.where(inside, source * outputs + target, inputs * outputs)
    return places.reshape(-1, rows * columns), shape


class DenseConvolution(torch.autograd.Function):
    """A convolution of tiny images as one matrix product: (n, b, inputs) × (n, inputs, outputs).

    More arithmetic than needed, all of it in the one operation CPUs are good at.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, places: Tensor, shape: tuple[int, ...]
    ) -> Tensor:
        n, inputs, outputs = len(weight), x.shape[2], torch.Size(shape).numel()
        matrix = weight.new_zeros(n, inputs * outputs + 1)
        repeated = weight.reshape(n, -1, 1).expand(-1, -1, places.shape[1]).reshape(n, -1)
        matrix.index_copy_(1, places.reshape(-1), repeated)
        matrix = matrix[:, :-1].view(n, inputs, outputs)
        ctx.save_for_backward(x, matrix)
        ctx.places, ctx.weight_shape = places, weight.shape
        return torch.bmm(x, matrix).reshape(*x.shape[:2], *shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix = ctx.saved_tensors
        grad = grads[0].flatten(2)
        dx = torch.bmm(grad, matrix.mT) if ctx.needs_input_grad[0] else None
        dense = grad.new_empty(len(x), matrix[0].numel() + 1)
        torch.bmm(x.mT, grad, out=dense[:, :-1].view(matrix.shape))
        dense[:, -1] = 0  # what falls off the image
        places: Tensor = ctx.places
        dw = dense.index_select(1, places.reshape(-1)).reshape(len(x), *places.shape).sum(2)
        return dx, dw.reshape(ctx.weight_shape), None, None


def conv2d_by_columns(
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...] | str,
    dilation: tuple[int, ...],
) -> Tensor:
    """A convolution as im2col and one batched matrix product, channels last in memory."""
    n, out_channels, channels, height, width = weight.shape
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if isinstance(padding, str):
        padding = (
            (dilation[0] * (height // 2), dilation[1] * (width // 2))
            if padding == "same"
            else (0, 0)
        )
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])).permute(0, 1, 3, 4, 2)
    rows = (x.shape[2] - dilation[0] * (height - 1) - 1) // stride[0] + 1
    columns = (x.shape[3] - dilation[1] * (width - 1) - 1) // stride[1] + 1
    shifted = [
        x[
            :,
            :,
            u * dilation[0] : u * dilation[0] + stride[0] * (rows - 1) + 1 : stride[0],
            v * dilation[1] : v * dilation[1] + stride[1] * (columns - 1) + 1 : stride[1],
        ]
        for u in range(height)
        for v in range(width)
    ]
    patches = torch.cat(shifted, -1).reshape(n, -1, height * width * channels)
    matrix = weight.permute(0, 3, 4, 2, 1).reshape(n, -1, out_channels)
    y = torch.bmm(patches, matrix)
    return y.reshape(n, -1, rows, columns, out_channels).permute(0, 1, 4, 2, 3)


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
    parts = []
    halves = torch.split(x, [first, x.shape[1] - first], 1)
    for number, part in enumerate(halves[: 1 if tensors.first is None else 2]):
        parts.append(_normalised(part, weight, bias, running[number:][:1], momentum, layer.eps))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


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
    wide = (n, 1, channels, *(1,) * (x.ndim - 3))
    y, mean, variance = _apply(BatchNorm, x, weight.reshape(wide), bias.reshape(wide), eps)
    for running_mean, running_variance in running:
        count = x.numel() // (n * channels)
        unbiased = variance * (count / (count - 1))
        running_mean.lerp_(mean.view(n, channels), momentum)
        running_variance.lerp_(unbiased.view(n, channels), momentum)
    normalised: Tensor = y.to(x.dtype)
    return normalised


class BatchNorm(torch.autograd.Function):
    """(n, b, c, …) normalised over b and what follows c; also the mean and variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dims = (1, *range(3, x.ndim))
        mean = x.mean(dims, keepdim=True, dtype=weight.dtype)
        centered = x - mean
        variance = centered.square().mean(dims, keepdim=True)
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(centered, scale, weight)
        ctx.mark_non_differentiable(mean, variance)
        return centered * (scale * weight) + bias, mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        centered, scale, weight = ctx.saved_tensors
        grad = grads[0]
        dims = (1, *range(3, grad.ndim))
        count = grad.numel() // weight.numel()
        dbias = grad.sum(dims, keepdim=True)
        slope = (grad * centered).sum(dims, keepdim=True)
        dx = None
        if ctx.needs_input_grad[0]:
            gain = scale * weight
            dx = (grad - dbias / count) * gain - centered * (slope * gain * scale.square() / count)
        return dx, slope * scale, dbias, None


def _max_pool2d(layer: nn.MaxPool2d, tensors: Tensors, at: str, x: Tensor | Deferred) -> Tensor:
    halves = _halves(layer) and not (x.shape[-1] % 2 or x.shape[-2] % 2)
    if isinstance(x, Deferred):
        if halves:
            return x.pooled()
        x = x.value()
    if halves:
        if x.is_cuda:
            return max_of_pairs(max_of_pairs(x, -1), -2)
        y: Tensor = _apply(HalvingMaxPool, x)
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


def max_of_pairs(x: Tensor, dim: int) -> Tensor:
    """The larger of each two neighbours; of equal ones the first, as PyTorch's pooling has it."""
    first, second = torch.unflatten(x, dim, (-1, 2)).unbind(dim)
    return torch.where(second > first, second, first)


class HalvingMaxPool(torch.autograd.Function):
    """The largest of each 2×2; of equal ones the first, as PyTorch's pooling has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        left, right = x[..., 0::2], x[..., 1::2]
        row = torch.maximum(left, right)
        upper, lower = row[..., 0::2, :], row[..., 1::2, :]
        ctx.save_for_backward(right > left, lower > upper)
        return torch.maximum(upper, lower)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        in_right, in_lower = ctx.saved_tensors
        grad = grads[0]
        row = grad.new_empty(in_right.shape)
        torch.mul(grad, in_lower, out=row[..., 1::2, :])
        torch.sub(grad, row[..., 1::2, :], out=row[..., 0::2, :])
        dx = grad.new_empty(*row.shape[:-1], 2 * row.shape[-1])
        torch.mul(row, in_right, out=dx[..., 1::2])
        torch.sub(row, dx[..., 1::2], out=dx[..., 0::2])
        return dx


def _average_to_one(layer: nn.AdaptiveAvgPool2d, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    return x.mean((-2, -1), keepdim=True)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


_ELEMENTWISE = (nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Identity)


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
    """The rules that make up the whole of ``module``; None where something in it has no rule."""
    chain = _links(module, "")
    if chain is None:
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
    links = [_links(child, f"{prefix}{name}.") for name, child in module.named_children()]
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


def with_mappable_batch_norm(module: nn.Module) -> None:
    """PyTorch's own BatchNorm cannot be mapped on every device where it is differentiated inside
    the mapping, as Per-FedAvg does. Written in basic operations it can."""
    for layer in module.modules():
        if type(layer) in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.momentum is not None:
            layer.forward = partial(_batch_norm_in_basics, layer)  # type: ignore[arg-type]


def _batch_norm_in_basics(layer: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """One client's BatchNorm."""
    mean, variance = layer.running_mean, layer.running_var
    if layer.training or mean is None or variance is None:
        dims = (0, *range(2, x.ndim))
        own_mean, own_variance = x.mean(dims), x.var(dims, correction=0)
        if layer.training and mean is not None and variance is not None:
            count, keep = x.numel() // x.shape[1], 1 - (layer.momentum or 0.0)
            unbiased = own_variance.detach() * (count / (count - 1))
            mean.mul_(keep).add_(own_mean.detach().to(mean.dtype) * (1 - keep))
            variance.mul_(keep).add_(unbiased.to(variance.dtype) * (1 - keep))
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.add_(1)
        mean, variance = own_mean, own_variance
    wide = (1, -1, *(1,) * (x.ndim - 2))
    y = (x - mean.view(wide)) * (variance + layer.eps).rsqrt().view(wide)
    return y * layer.weight.view(wide) + layer.bias.view(wide) if layer.affine else y


def mapped_chain(chain: Chain, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """Inside ``vmap``, the chain for all clients; None where it is not plainly that."""
    stack = physical([x, *tensors.values()])
    if stack is None:
        return None
    with stack.entered():
        named = dict(zip(tensors, stack.tensors[1:], strict=True))
        y = run_chain(chain, Tensors(named), stack.tensors[0])
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
        tensors = Tensors(own, private.shape[1], other)
        y = run_chain(chain, tensors, torch.cat([private, public], 1))
        first, second = y[:, : private.shape[1]], y[:, private.shape[1] :]
    return stack.wrap(first), stack.wrap(second)
