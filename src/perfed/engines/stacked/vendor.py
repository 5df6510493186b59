"""Convolutions of a stack on a GPU by the vendor's libraries, where there is no kernel of our own.

cuDNN's run client by client: a step is recorded in a CUDA graph (:mod:`.recorded`), so starting a
kernel for each client costs nothing. One client's layer may be too small for the whole GPU: a few
streams run side by side. Where cuBLAS is faster, a convolution is a matrix product for all clients
at once, of patches if need be. Images and weights lie in memory with their channels last.

Which way is taken follows from shapes and precision alone, so that a run can be repeated. The
measurements behind it: ``benchmarks/single_precision.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perfed.engines.stacked import hopper
from perfed.engines.stacked.operations import Geometry, Pair, apply, output_size

try:
    from perfed.engines.stacked.triton_patches import patches
except ImportError:  # no Triton on this machine
    patches = None  # type: ignore[assignment]

STREAMS = 4
SMALL_PATCH = 64
"""Up to which the gradient of the weights is a product, too: a first layer's few channels."""
PATCHES_AT_ONCE = 1 << 28
"""Entries, over all clients; of one client there may be more."""
ROWS_OF_A_SHARE = 1024
ENTRIES_ENOUGH = 1 << 22
"""Of a product's shares: what keeps all of a GPU busy."""

IN_MEMORY = (0, 1, 3, 4, 2)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    groups: int = 1,
    *,
    bias_grad: bool = True,
) -> Tensor:
    """``bias_grad=False``: the bias has no gradient, as in front of a BatchNorm."""
    y: Tensor = apply(Convolution, x, weight, geometry, groups)
    if bias is None:
        return y
    bias = bias if bias_grad else bias.detach()
    return y + bias[:, None, :, None, None].to(y.dtype)


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, geometry: Geometry, groups: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.groups = geometry, groups
        if groups == 1 and _is_product(x, weight, geometry):
            return _product(x, weight, geometry)
        x, weight = _channels_last(x), _channels_last(weight)
        size = output_size(x.shape[3:], weight.shape[3:], geometry)
        y = _empty(x, (*x.shape[:2], weight.shape[1], *size))

        def one(client: int) -> None:
            y[client].copy_(F.conv2d(x[client], weight[client], None, *geometry, groups))

        _side_by_side(one, x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad[:2]
        dx = dw = None
        # The gradient of a gradient is cuDNN's: our products have none.
        if ctx.groups == 1 and not torch.is_grad_enabled():
            dx = _input_gradient(grads[0], x, weight, ctx.geometry) if of_x else None
            dw = _weight_gradient(grads[0], x, weight, ctx.geometry) if of_weight else None
        wanted = of_x and dx is None, of_weight and dw is None
        others = _gradients(grads[0], x, weight, ctx.geometry, ctx.groups, wanted)
        return others[0] if dx is None else dx, others[1] if dw is None else dw, None, None


def _gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    groups: int,
    wanted: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """By cuDNN."""
    if not any(wanted):
        return None, None
    grad, x, weight = (_channels_last(t) for t in (grad, x, weight))
    dx = _empty(x, x.shape) if wanted[0] else None
    dw = _empty(weight, weight.shape) if wanted[1] else None

    def one(client: int) -> None:
        found = torch.ops.aten.convolution_backward(
            grad[client], x[client], weight[client], None, *geometry,
            False, (0, 0), groups, (*wanted, False),
        )  # fmt: skip
        for place, gradient in ((dx, found[0]), (dw, found[1])):
            if place is not None:
                place[client].copy_(gradient)

    _side_by_side(one, x)
    return dx, dw


def _is_pointwise(weight: Tensor, geometry: Geometry) -> bool:
    """Whether images are their own patches."""
    return weight.shape[3:] == (1, 1) and geometry[:2] == ((1, 1), (0, 0))


def _is_product(x: Tensor, weight: Tensor, geometry: Geometry) -> bool:
    """In float32 cuDNN's convolutions are slow; in tf32 they are faster than gathering patches."""
    if _is_pointwise(weight, geometry):
        return True
    exact = x.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
    return exact and hopper.normalises(x)


def _product(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    size = output_size(x.shape[3:], weight.shape[3:], geometry)
    matrices = _in_memory(weight).flatten(2).mT
    return _multiplied(x, matrices, weight, size, geometry)


def _input_gradient(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """As a product with the gradient's patches, which lie the other way round; None where it is no
    product, or a slow one."""
    stride, padding, dilation = geometry
    if stride != (1, 1) or not _is_product(grad, weight, geometry):
        return None
    back: Geometry = (stride, (-padding[0], -padding[1]), (-dilation[0], -dilation[1]))
    matrices = _in_memory(weight).permute(0, 2, 3, 1, 4).flatten(1, 3)
    return _multiplied(grad, matrices, weight, (x.shape[3], x.shape[4]), back)


def _weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """As a product with the patches; None where cuDNN is faster."""
    small = weight[0, 0].numel() <= SMALL_PATCH and _is_product(x, weight, geometry)
    if not (small or _is_pointwise(weight, geometry)):
        return None
    rows = _in_memory(grad).flatten(1, 3)
    size = grad.shape[3], grad.shape[4]
    parts = [_over_rows(rows[part], seen) for part, seen in _patches(x, weight, size, geometry)]
    n, out, channels, height, width = weight.shape
    return torch.cat(parts).view(n, out, height, width, channels).permute(0, 1, 4, 2, 3)


def _multiplied(
    x: Tensor, matrices: Tensor, weight: Tensor, size: Pair, geometry: Geometry
) -> Tensor:
    """The patches of all clients times (n, kh·kw·c, o): (n, b, o, *size)."""
    y = _empty(x, (*x.shape[:2], matrices.shape[2], *size))
    rows = _in_memory(y).flatten(1, 3)
    for part, seen in _patches(x, weight, size, geometry):
        torch.bmm(seen, matrices[part], out=rows[part])
    return y


def _patches(
    x: Tensor, weight: Tensor, size: Pair, geometry: Geometry
) -> Iterator[tuple[slice, Tensor]]:
    """What a kernel sees of some clients' images at each of its places, (n, places, kh·kw·c)."""
    images, kernel = _in_memory(x), (weight.shape[3], weight.shape[4])
    if _is_pointwise(weight, geometry):
        yield slice(None), images.flatten(1, 3)
        return
    entries = x[0, :, :, 0, 0].numel() * math.prod(kernel) * math.prod(size)  # of one client
    at_once = max(1, PATCHES_AT_ONCE // entries)
    for start in range(0, len(x), at_once):
        part = slice(start, start + at_once)
        yield part, patches(images[part], kernel, size, geometry)


def _over_rows(left: Tensor, right: Tensor) -> Tensor:
    """(n, r, o) and (n, r, c) to (n, o, c). The sum over many rows is cut into shares, for cuBLAS
    would leave most of a GPU idle."""
    n, rows, out = left.shape
    shares = 1
    while (
        rows % (2 * shares) == 0
        and rows // (2 * shares) >= ROWS_OF_A_SHARE
        and n * shares * out * right.shape[2] < ENTRIES_ENOUGH
    ):
        shares *= 2
    cut = [t.reshape(n * shares, rows // shares, -1) for t in (left, right)]
    products = torch.bmm(cut[0].mT, cut[1])
    return products.view(n, shares, out, -1).sum(1) if shares > 1 else products


def _in_memory(x: Tensor) -> Tensor:
    """(n, b, c, h, w) as (n, b, h, w, c), dense; no copy if it lies so already."""
    return x.permute(IN_MEMORY).contiguous()


def _channels_last(x: Tensor) -> Tensor:
    """The same tensor, lying so."""
    return _in_memory(x).permute(0, 1, 4, 2, 3)


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty_permuted(shape, IN_MEMORY, dtype=like.dtype, device=like.device)


def _side_by_side(work: Callable[[int], None], stack: Tensor) -> None:
    """``work`` for each client of a stack. Where it leaves something, that has been allocated
    before: what is allocated inside belongs to one of the streams."""
    if not stack.is_cuda:
        for client in range(len(stack)):
            work(client)
        return
    now = torch.cuda.current_stream(stack.device)
    streams = _streams(stack.device)
    for stream in streams:
        stream.wait_stream(now)
    with _repeatable():
        for client in range(len(stack)):
            with torch.cuda.stream(streams[client % len(streams)]):
                work(client)
    for stream in streams:
        now.wait_stream(stream)


@contextmanager
def _repeatable() -> Iterator[None]:
    """Inside, cuDNN computes the same in every run: it does not choose by timing, and sums in a
    fixed order."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
