# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Convolution and BatchNorm of a stack on a Hopper GPU in half precision.

Images are logically (n, b, c, h, w) and lie in memory as (n, b, h, w, c); convolution weights are
logically (n, o, c, kh, kw) and lie as (n, o, kh, kw, c). What lies otherwise costs a copy.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

try:
    from perfed.engines.stacked import triton_kernels as kernels
except ImportError:  # no Triton on this machine
    kernels = None  # type: ignore[assignment]

log = logging.getLogger("perfed")
Pair = tuple[int, int]
SMALL_PATCH = 64
"""Values in a patch up to which patches are gathered: a first layer's few channels."""

LARGE = 1 << 16
"""Entries from which one pass over memory, instead of three, is worth a kernel of its own."""


def usable(x: Tensor) -> bool:
    return (
        kernels is not None
        and x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() // x.shape[0] < 2**30  # offsets within a client are 32 bits wide
        and _works(x.device)
    )


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether kernels can be compiled for this GPU, found by trying."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        with torch.cuda.device(device):
            kernels.descend(*(torch.zeros(1, device=device) for _ in range(3)))
    except Exception as error:  # whatever a compiler, or the lack of one, can stumble over
        log.warning("convolutions run without kernels of their own, slower: %s", error)
        return False
    return True


def compiling(device: torch.device) -> AbstractContextManager[None]:
    """Inside, kernels are noted, not run; on leaving they are compiled side by side."""
    works = kernels is not None and device.type == "cuda" and _works(device)
    return kernels.compiling() if works else contextlib.nullcontext()


def dense_layout(tensor: Tensor) -> Tensor:
    """A copy that lies as the kernels read it."""
    if tensor.ndim != 5:
        return tensor.clone(memory_format=torch.contiguous_format)
    return _first(tensor.permute(0, 1, 3, 4, 2).clone(memory_format=torch.contiguous_format))


def descend(param: Tensor, grad: Tensor, rate: Tensor) -> None:
    """param −= rate·grad, in float32 whatever the gradient is in."""
    alike = param.stride() == grad.stride() and param.dtype == torch.float32
    if usable(grad) and alike and param.numel() >= LARGE:
        kernels.descend(param, grad, rate)
    else:
        param.addcmul_(grad.to(param.dtype), rate, value=-1)


def _last(x: Tensor) -> Tensor:
    """(n, b, c, h, w) → contiguous (n, b, h, w, c); no copy if it lies so already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _first(x: Tensor) -> Tensor:
    """(n, b, h, w, c) → (n, b, c, h, w), and no view of it: what follows may work in place."""
    return x.permute(0, 1, 4, 2, 3).data


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: tuple[Pair, Pair, Pair],
    *,
    bias_grad: bool,
) -> Tensor | None:
    """The convolution; None where there is no kernel for it.

    ``bias_grad=False`` gives the bias a gradient of zeros: what it is, up to rounding, when a
    BatchNorm with batch statistics follows; computing it costs one more pass over the gradient.
    """
    out, channels, height, width = weight.shape[1:]
    small = kernels.patch_size(height, width, channels) <= SMALL_PATCH
    aligned = geometry[0] == (1, 1) and channels % 8 == out % 8 == 0  # for the copy engine
    if x.requires_grad if small else not aligned:
        return None
    moments: list[Any] = []
    y: Tensor = Convolution.apply(x, weight, bias, geometry, small, bias_grad, moments)
    y._moments = (moments[0], y._version)  # type: ignore[attr-defined]
    return y


class Convolution(torch.autograd.Function):
    """The convolution, and on the way the moments that a BatchNorm after it needs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: tuple[Pair, Pair, Pair],
        small: bool,
        bias_grad: bool,
        moments: list[Any],
    ) -> Tensor:
        x, weight = _last(x), weight.permute(0, 1, 3, 4, 2).contiguous()
        if small:
            channels = 1 << (x.shape[4] - 1).bit_length()
            x = F.pad(x, (0, channels - x.shape[4]))
        ctx.save_for_backward(x, weight)
        ctx.small, ctx.geometry, ctx.bias_grad = small, geometry, bias_grad
        bias = None if bias is None else bias.contiguous()
        ctx.bias_dtype = None if bias is None else bias.dtype
        if small:
            y, found = kernels.small_forward(x, weight, bias, *geometry)
        else:
            y, found = kernels.conv_forward(x, weight, bias, *geometry[1:])
        moments.append(found)
        return _first(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = _last(grads[0])
        dx = dw = db = None
        if ctx.needs_input_grad[1]:
            if ctx.small:
                dw = kernels.small_weight_grad(x, grad, weight.shape[2:], *ctx.geometry)
            else:
                dw = kernels.conv_weight_grad(x, grad, weight.shape[2:4], *ctx.geometry[1:])
            dw = _first(dw)
        if ctx.needs_input_grad[0]:
            dx = _first(kernels.conv_input_grad(grad, weight, x.shape[2:4], *ctx.geometry[1:]))
        if ctx.needs_input_grad[2]:
            if ctx.bias_grad:
                db = grad.flatten(1, 3).sum(1, dtype=torch.float32).to(ctx.bias_dtype)
            else:
                db = grad.new_zeros(weight.shape[:2], dtype=ctx.bias_dtype)
        return dx, dw, db, None, None, None, None


def batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Sequence[tuple[Tensor, Tensor]],
    momentum: float,
    eps: float,
    first: int,
) -> Deferred:
    """With batch statistics, of the first ``first`` samples and of the rest; moves ``running``,
    the means and variances of each of the two."""
    moments, version = getattr(x, "_moments", (None, 0))
    mean, inv = kernels.norm_stats(
        _last(x.detach()),
        moments if version == x._version else None,
        first,
        running,
        momentum,
        eps,
    )
    return Deferred(x, (weight.contiguous(), bias.contiguous(), mean, inv), first)


def batch_norm_evaluating(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> Deferred:
    """With given statistics, and no gradient."""
    statistics = mean.contiguous(), (variance + eps).rsqrt().contiguous()
    parameters = (weight.contiguous(), bias.contiguous(), *statistics)
    return Deferred(x, parameters, x.shape[1], tracked=False)


class Deferred:
    """A normalisation whose statistics are known but which has not been applied yet.

    A ReLU and a 2×2 maximum that come next then run in the same kernel, forward and backward.
    """

    def __init__(
        self,
        x: Tensor,
        parameters: tuple[Tensor, ...],
        first: int,
        *,
        tracked: bool = True,
        rectified: bool = False,
    ) -> None:
        self._x, self._parameters, self._first = x, parameters, first
        self._tracked, self._rectified = tracked, rectified
        self.shape = x.shape

    def relu(self) -> Deferred:
        return Deferred(
            self._x, self._parameters, self._first, tracked=self._tracked, rectified=True
        )

    def value(self) -> Tensor:
        return self._applied(pool=False)

    def pooled(self) -> Tensor:
        return self._applied(pool=True)

    def _applied(self, pool: bool) -> Tensor:
        if self._tracked:
            y: Tensor = Normalisation.apply(
                self._x, *self._parameters, self._first, self._rectified, pool
            )
            return y
        weight, bias, mean, inv = self._parameters
        plain, _ = kernels.norm_apply(
            _last(self._x), mean, inv, weight, bias, self._first, self._rectified, pool
        )
        return _first(plain)


class Normalisation(torch.autograd.Function):
    """Normalise with batch statistics, then ReLU and 2×2 maximum as asked."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        inv: Tensor,
        first: int,
        relu: bool,
        pool: bool,
    ) -> Tensor:
        x = _last(x)
        y, winners = kernels.norm_apply(x, mean, inv, weight, bias, first, relu, pool, keep=True)
        ctx.save_for_backward(x, winners, weight, bias, mean, inv)
        ctx.options = (first, relu, pool)
        return _first(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, winners, weight, bias, mean, inv = ctx.saved_tensors
        dx, dw, db = kernels.norm_backward(
            _last(grads[0]), x, winners, mean, inv, weight, bias, *ctx.options
        )
        return _first(dx), dw.to(weight.dtype), db.to(bias.dtype), None, None, None, None, None
