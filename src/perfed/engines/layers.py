"""The layers that matter, for a stack of models: tensor ``t[k]`` belongs to client *k*.

A rule computes one kind of layer for all clients of a stack at once, ``(n, batch, …) → (n, batch,
…)``. A module made of such layers only runs on its rules alone. In any other module, those layers
that have a rule use it, and PyTorch's own batching rules (``torch.func.vmap``) do the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perfed.engines.lanes import physical

Tensors = Mapping[str, Tensor]
Rule = Callable[[Any, Tensors, str, Tensor], Tensor]  # (layer, stacked tensors, prefix, input)
Chain = list[tuple[Rule, nn.Module, str]]


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


def _flatten(layer: nn.Flatten, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    def outside(dim: int) -> int:
        return dim + 1 if dim >= 0 else dim

    return x.flatten(outside(layer.start_dim), outside(layer.end_dim))


def _side_by_side(x: Tensor) -> Tensor:
    """(n, b, c, …) as (b, n·c, …): the channels of all clients side by side.

    Free where a rule below made ``x``, whose memory is laid out like that on a CPU.
    """
    return x.transpose(0, 1).flatten(1, 2)


def _apart(x: Tensor, clients: int) -> Tensor:
    """The inverse of :func:`_side_by_side`."""
    return x.reshape(len(x), clients, -1, *x.shape[2:]).transpose(0, 1)


def _conv2d(layer: nn.Conv2d, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    weight = tensors[at + "weight"]
    bias = None if layer.bias is None else tensors[at + "bias"]
    if x.is_cuda:
        y = conv2d_by_columns(x, weight, layer.stride, layer.padding, layer.dilation)
        return y if bias is None else y + bias[:, None, :, None, None].to(y.dtype)
    geometry: tuple[Any, ...] = (layer.stride, layer.padding, layer.dilation)
    n = len(weight)
    flat = None if bias is None else bias.flatten()
    return _apart(F.conv2d(_side_by_side(x), weight.flatten(0, 1), flat, *geometry, n), n)


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


def _batch_norm(layer: nn.BatchNorm2d, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    own = {name: tensors[at + name] for name, _ in layer.named_parameters()}
    own |= {name: tensors[at + name] for name, _ in layer.named_buffers()}
    batch_statistics = layer.training or layer.running_mean is None
    if layer.training and layer.running_mean is not None:
        own["num_batches_tracked"].add_(1)
    if x.is_cuda and batch_statistics:
        return _batch_norm_cuda(layer, own, x)
    flat = {name: t.flatten() for name, t in own.items()}
    y = F.batch_norm(
        _side_by_side(x),
        flat.get("running_mean"),
        flat.get("running_var"),
        flat.get("weight"),
        flat.get("bias"),
        batch_statistics,
        layer.momentum or 0.0,
        layer.eps,
    )
    return _apart(y, len(x))


def _batch_norm_cuda(layer: nn.BatchNorm2d, own: Tensors, x: Tensor) -> Tensor:
    def wide(t: Tensor) -> Tensor:
        return t.reshape(len(t), 1, -1, *(1,) * (x.ndim - 3))

    y, mean, variance = BatchNorm.apply(x, layer.eps)
    if layer.running_mean is not None:
        count = x.numel() // (x.shape[0] * x.shape[2])
        own["running_mean"].lerp_(mean, layer.momentum)
        own["running_var"].lerp_(variance * (count / (count - 1)), layer.momentum)
    if layer.affine:
        y = torch.addcmul(wide(own["bias"]), y, wide(own["weight"]))
    return y.to(x.dtype)


class BatchNorm(torch.autograd.Function):
    """(n, b, c, …) normalised over b and what follows c; also the mean and variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        dims = (1, *range(3, x.ndim))
        mean = x.mean(dims, keepdim=True)
        centered = x - mean
        variance = centered.square().mean(dims, keepdim=True)
        scale = (variance + eps).rsqrt()
        y = centered.mul_(scale)
        ctx.save_for_backward(y, scale)
        mean, variance = mean.flatten(1), variance.flatten(1)
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        grad = grads[0]
        dims = (1, *range(3, y.ndim))
        mean = grad.mean(dims, keepdim=True)
        slope = (grad * y).mean(dims, keepdim=True)
        return (grad - mean).addcmul_(y, slope, value=-1).mul_(scale), None


def _max_pool2d(layer: nn.MaxPool2d, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    if x.is_cuda and _halves(layer) and not (x.shape[-1] % 2 or x.shape[-2] % 2):
        return max_of_pairs(max_of_pairs(x, -1), -2)
    y: Tensor = layer(_side_by_side(x))
    return _apart(y, len(x))


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
    first, second = x.unflatten(dim, (-1, 2)).unbind(dim)
    return torch.where(second > first, second, first)


def _average_to_one(layer: nn.AdaptiveAvgPool2d, tensors: Tensors, at: str, x: Tensor) -> Tensor:
    return x.mean((-2, -1), keepdim=True)


_ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.Identity)


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule for exactly this kind of layer; a subclass may do something else."""
    kind = type(layer)
    if kind is nn.Linear:
        return _linear
    if kind in _ELEMENTWISE:
        return None if getattr(layer, "inplace", False) else _elementwise
    if kind is nn.Flatten:
        return _flatten if layer.start_dim >= 1 else None
    if kind is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros":
        return _conv2d if not isinstance(layer.padding, str) else None
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d) and layer.momentum is not None:
        return _batch_norm
    if kind is nn.MaxPool2d and not layer.return_indices:
        return _max_pool2d
    if kind is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1)):
        return _average_to_one
    return None


def chain_of(module: nn.Module, prefix: str = "") -> Chain | None:
    """The rules that make up the whole of ``module``; None where something in it has no rule."""
    if module._forward_hooks or module._forward_pre_hooks:
        return None
    rule = rule_for(module)
    if rule is not None:
        return [(rule, module, prefix)]
    if type(module) is not nn.Sequential:
        return None
    links = [chain_of(child, f"{prefix}{name}.") for name, child in module.named_children()]
    return [link for part in links for link in part or []] if None not in links else None


def run_chain(chain: Chain, tensors: Tensors, x: Tensor) -> Tensor:
    for rule, layer, prefix in chain:
        x = rule(layer, tensors, prefix, x)
    return x


def with_rules(module: nn.Module) -> None:
    """Let every layer of ``module`` that has a rule use it where it is mapped over a stack."""
    chain = chain_of(module)
    if chain is not None:
        module.forward = partial(_mapped, module, chain)
    else:
        for child in module.children():
            with_rules(child)


def _mapped(layer: nn.Module, chain: Chain, x: Tensor) -> Tensor:
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    y = mapped_chain(chain, tensors, x)
    return type(layer).forward(layer, x) if y is None else y


def mapped_chain(chain: Chain, tensors: Tensors, x: Tensor) -> Tensor | None:
    """Inside ``vmap``, the chain for all clients; None where it is not plainly that."""
    stack = physical([x, *tensors.values()])
    if stack is None:
        return None
    with stack.entered():
        y = run_chain(chain, dict(zip(tensors, stack.tensors[1:], strict=True)), stack.tensors[0])
    return stack.wrap(y)
