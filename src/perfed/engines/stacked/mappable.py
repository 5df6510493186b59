"""Layers in basic operations, where torch's own cannot be mapped over clients, or are wrong there.

What a layer computes is the same. Each is replaced in the copy of a module that the engine maps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import _WeightNorm

from perfed.engines.stacked.attention import multihead
from perfed.engines.stacked.recurrent import CELLS, run


def make_mappable(module: nn.Module) -> None:
    for layer in module.modules():
        replacement = _REPLACEMENTS.get(type(layer))
        if replacement is not None:
            layer.forward = partial(replacement, layer, layer.forward)


Forward = Callable[..., Any]  # the layer's own


def _batch_norm(layer: nn.BatchNorm2d, otherwise: Forward, x: Tensor) -> Tensor:
    """torch's cannot be mapped on every device where it is differentiated inside the mapping, as
    Per-FedAvg does."""
    mean, variance = layer.running_mean, layer.running_var
    if layer.training or mean is None or variance is None:
        dims = (0, *range(2, x.ndim))
        own_mean, own_variance = x.mean(dims), x.var(dims, correction=0)
        if layer.training and mean is not None and variance is not None:
            assert layer.num_batches_tracked is not None
            layer.num_batches_tracked.add_(1)
            share: float | Tensor | None = layer.momentum
            if share is None:  # the mean over all batches so far
                share = layer.num_batches_tracked.to(mean.dtype).reciprocal()
            unbiased = own_variance.detach() * unbiasing(x.numel() // x.shape[1])
            mean.mul_(1 - share).add_(own_mean.detach().to(mean.dtype) * share)
            variance.mul_(1 - share).add_(unbiased.to(variance.dtype) * share)
        mean, variance = own_mean, own_variance
    wide = (1, -1, *(1,) * (x.ndim - 2))
    y = (x - mean.view(wide)) * (variance + layer.eps).rsqrt().view(wide)
    return y * layer.weight.view(wide) + layer.bias.view(wide) if layer.affine else y


def unbiasing(count: int) -> float:
    """From the variance of ``count`` values to the estimate that running statistics hold."""
    if count == 1:
        raise ValueError("BatchNorm needs more than one value per channel when training")
    return count / (count - 1)


def _embedding(layer: nn.Embedding, otherwise: Forward, x: Tensor) -> Tensor:
    """torch's batching rule forgets ``padding_idx``: that row would learn."""
    return F.embedding(x, _table(layer))


def _embedding_bag(
    layer: nn.EmbeddingBag,
    otherwise: Forward,
    x: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
) -> Tensor:
    """Bags of one size, as rows of ``x``; torch's would run client by client."""
    if offsets is not None or x.ndim != 2 or layer.padding_idx is not None:
        bag: Tensor = otherwise(x, offsets, per_sample_weights)
        return bag
    rows = F.embedding(x, _table(layer))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if layer.mode == "max":
        return rows.amax(1)
    return rows.sum(1) if layer.mode == "sum" else rows.mean(1)


def _table(layer: nn.Embedding | nn.EmbeddingBag) -> Tensor:
    """The rows, of which that for padding does not learn."""
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise ValueError("an Embedding with max_norm, scale_grad_by_freq or sparse is not stacked")
    if layer.padding_idx is None:
        return layer.weight
    number = torch.arange(len(layer.weight), device=layer.weight.device)
    is_padding = (number == layer.padding_idx).unsqueeze(1)
    return torch.where(is_padding, layer.weight.detach(), layer.weight)


def _weight_norm(layer: _WeightNorm, otherwise: Forward, g: Tensor, v: Tensor) -> Tensor:
    """torch's would run client by client."""
    dims = [dim for dim in range(v.ndim) if dim != layer.dim]  # -1: all of them
    scale: Tensor = g / v.square().sum(dims, keepdim=True).sqrt()
    return v * scale


_REPLACEMENTS: dict[type[nn.Module], Callable[..., Any]] = {
    nn.BatchNorm1d: _batch_norm,
    nn.BatchNorm2d: _batch_norm,
    nn.BatchNorm3d: _batch_norm,
    nn.Embedding: _embedding,
    nn.EmbeddingBag: _embedding_bag,
    nn.MultiheadAttention: multihead,
    _WeightNorm: _weight_norm,
    **dict.fromkeys(CELLS, run),
}
