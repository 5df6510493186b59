"""What the rules for layers compute with: operations on stacks, with gradients of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

PATCHES_LIMIT = 4096
"""Entries of a sample's patches up to which gathering them beats PyTorch's convolution."""

Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair]  # stride, padding, dilation


def precision(tensor: Tensor) -> torch.dtype:
    """What PyTorch's own layers compute in, under ``torch.autocast``."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def in_precision(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What PyTorch's own layers do to their inputs."""
    return tuple(tensor.to(precision(tensor)) for tensor in tensors)


def batch_last(x: Tensor) -> bool:
    """Whether (n, b, …) lies in memory as (n, …, b): small images, on a CPU."""
    return x.movedim(1, -1).is_contiguous()


def output_size(image: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> Pair:
    rows, columns = (
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(image, kernel, *geometry, strict=True)
    )
    return rows, columns


def conv2d_batch_last(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """A convolution as one matrix product (n, o, c·kh·kw) × (n, c·kh·kw, rows·columns·b).

    With the batch last in memory, patches are gathered in long runs, and what follows (BatchNorm,
    pooling, the next layer) works on long runs too.
    """
    size = output_size(x.shape[3:], weight.shape[3:], geometry)
    patches = apply(Patches, x.movedim(1, -1), tuple(weight.shape[3:]), geometry)
    if bias is None:
        y = torch.bmm(weight.flatten(2), patches)
    else:
        y = torch.baddbmm(bias.unsqueeze(2).to(weight.dtype), weight.flatten(2), patches)
    return y.view(*weight.shape[:2], *size, x.shape[1]).movedim(-1, 1)


class Patches(torch.autograd.Function):
    """What a kernel sees of (n, c, h, w, b) at each of its places: (n, c·kh·kw, places·b)."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
        padding = geometry[1]
        ctx.shape, ctx.kernel, ctx.geometry = images.shape, kernel, geometry
        padded = F.pad(images, (0, 0, padding[1], padding[1], padding[0], padding[0])).contiguous()
        return _windows(padded, kernel, geometry).reshape(
            len(images), images.shape[1] * kernel[0] * kernel[1], -1
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        n, channels, height, width, batch = ctx.shape
        (above, left), kernel = ctx.geometry[1], ctx.kernel
        padded = grads[0].new_zeros(n, channels, height + 2 * above, width + 2 * left, batch)
        windows = _windows(padded, kernel, ctx.geometry)
        grad = grads[0].view(windows.shape)
        for u in range(kernel[0]):  # one after another: windows overlap
            for v in range(kernel[1]):
                windows[:, :, u, v].add_(grad[:, :, u, v])
        return padded[:, :, above : above + height, left : left + width], None, None


def _windows(padded: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    """A view of (n, c, h, w, b): (n, c, kh, kw, rows, columns, b)."""
    (down, right), _, (far_down, far_right) = geometry
    n, channels, height, width, batch = padded.shape
    rows, columns = output_size((height, width), kernel, (geometry[0], (0, 0), geometry[2]))
    of_n, of_channel, of_row, of_column, _ = padded.stride()
    return padded.as_strided(
        (n, channels, *kernel, rows, columns, batch),
        (
            of_n,
            of_channel,
            of_row * far_down,
            of_column * far_right,
            of_row * down,
            of_column * right,
            1,
        ),
    )


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


class Chunks(torch.autograd.Function):
    """``torch.chunk``. Its gradient costs nothing where the parts' gradients lie side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, dim: int) -> tuple[Tensor, ...]:
        ctx.dim = dim
        return tuple(part.data for part in x.chunk(count, dim))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        whole = _side_by_side(grads, ctx.dim)
        return torch.cat(grads, ctx.dim) if whole is None else whole, None, None


def _side_by_side(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The tensor that they are parts of, one after another; None where they are not."""
    first = parts[0]
    memory, size = first.untyped_storage().data_ptr(), first.shape[dim] * first.stride(dim)
    for number, part in enumerate(parts):
        here = part.storage_offset() == first.storage_offset() + number * size
        if not here or part.untyped_storage().data_ptr() != memory:
            return None
        if part.shape != first.shape or part.stride() != first.stride():
            return None
    shape = list(first.shape)
    shape[dim] *= len(parts)
    return first.as_strided(shape, first.stride())


def max_of_pairs(x: Tensor, dim: int) -> Tensor:
    """The larger of each two neighbours; of equal ones the first, as PyTorch's pooling has it."""
    first, second = torch.unflatten(x, dim, (-1, 2)).unbind(dim)
    return torch.where(second > first, second, first)


class HalvingMaxPool(torch.autograd.Function):
    """The largest of each 2×2; of equal ones the first, as PyTorch's pooling has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        row = torch.maximum(*_neighbours(x, -1))
        ctx.save_for_backward(x, row)
        return torch.maximum(*_neighbours(row, -2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, row = ctx.saved_tensors
        return _to_larger(_to_larger(grads[0], row, -2), x, -1)


def _to_larger(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    """Of each two neighbours, the gradient to the larger one and zero to the other."""
    dx = torch.empty_like(x)
    first, second = _neighbours(x, dim)
    to_first, to_second = _neighbours(dx, dim)
    # Not a mask: PyTorch is slow where truth values meet numbers.
    torch.ops.aten.threshold_backward.grad_input(grad, second - first, 0, grad_input=to_second)
    torch.sub(grad, to_second, out=to_first)
    return dx


def _neighbours(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return (x[..., 0::2], x[..., 1::2]) if dim == -1 else (x[..., 0::2, :], x[..., 1::2, :])


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    return function.apply(*arguments)  # type: ignore[no-untyped-call]
