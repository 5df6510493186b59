"""What the rules for layers compute with: operations on stacks, with gradients of their own."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

DENSE_LIMIT = 1 << 16
"""Entries up to which a convolution is written as one dense matrix: tiny images, on a CPU."""


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
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """A convolution as im2col and one batched matrix product, channels last in memory."""
    n, out_channels, channels, height, width = weight.shape
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


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]
