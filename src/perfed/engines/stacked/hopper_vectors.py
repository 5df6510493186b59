# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Linear layers, LayerNorm and attention of a stack on a Hopper GPU: what a transformer is made of,
on lists of vectors (n, …, d). Attention in half precision only.

Around a matrix product, memory is what takes time. So a bias, a GELU, a residual sum and LayerNorm
share a pass, forward and backward, and LayerNorm gives what the next product reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perfed.engines.stacked import hopper
from perfed.engines.stacked.hopper import KINDS, Deferred

with contextlib.suppress(ImportError):  # no Triton on this machine
    from perfed.engines.stacked import triton_attention, triton_linear, triton_norms

Grads = tuple[Tensor | None, ...]


def normalises(x: Tensor) -> bool:
    """Whether the kernels for LayerNorm can be used."""
    return hopper.available(x) and x.dtype in KINDS


def multiplies(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear` can be used: not for odd numbers of outputs."""
    alike = x.dtype == weight.dtype and x.dtype in KINDS
    return hopper.available(x) and alike and not any(size % 8 for size in weight.shape[1:])


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Deferred:
    """(n, …, i) by (n, o, i), in one precision; the bias (n, o) may have another."""
    return Product(
        _rows(x).contiguous(), weight, bias.contiguous(), (*x.shape[:-1], weight.shape[1])
    )


class Product(Deferred):
    """A linear layer whose bias is added in the kernel of what comes next."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(torch.Size(shape))
        self.factors = x, weight, bias

    def activated(self) -> Tensor:
        y: Tensor = LinearGelu.apply(*self.factors)
        return y.view(self.shape)

    def plus(self, other: Tensor) -> Deferred | None:
        if other.shape != self.shape or other.dtype != torch.float32:
            return None
        return Total(other, self)

    def value(self) -> Tensor:
        y: Tensor = Linear.apply(*self.factors)
        return y.view(self.shape)


class Total(Deferred):
    """A residual sum. What normalises it computes it on the way."""

    shared = True

    def __init__(self, x: Tensor, product: Product) -> None:
        super().__init__(x.shape)
        self.x, self.product = x, product
        self.found: Tensor | None = None

    def normed(self, weight: Tensor, bias: Tensor, eps: float) -> Deferred:
        return Normed(self, weight, bias, eps)

    def value(self) -> Tensor:
        if self.found is None:
            self.found = self.x + self.product.value()
        return self.found


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Deferred:
    return Normed(x, weight, bias, eps)


class Normed(Deferred):
    """LayerNorm over the last dimension. It is in float32, as under ``torch.autocast``; a matrix
    product, which would round it, asks for it in its own precision."""

    shared = True

    def __init__(self, x: Tensor | Total, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__(x.shape)
        self._x, self._parameters = x, (weight.contiguous(), bias.contiguous(), eps)
        self._found: dict[torch.dtype, Tensor] = {}

    def value(self) -> Tensor:
        return self.value_in(torch.float32)

    def value_in(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._found:
            self._found[dtype] = self._applied(dtype).view(self.shape)
        return self._found[dtype]

    def _applied(self, dtype: torch.dtype) -> Tensor:
        total, how = self._x, (*self._parameters, dtype)
        if isinstance(total, Total) and total.found is None:
            found, y = LinearAddNorm.apply(_rows(total.x), *total.product.factors, *how)
            total.found = found.view(total.shape)
        else:
            x = total.value() if isinstance(total, Total) else total
            y = LayerNormalisation.apply(_rows(x), *how)
        return y


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(x, weight.mT)


def _gradients(dy: Tensor, x: Tensor, weight: Tensor, needed: Sequence[bool]) -> Grads:
    """Of the factors of a product, as far as somebody needs them."""
    of_x, of_weight = needed
    return torch.bmm(dy, weight) if of_x else None, torch.bmm(dy.mT, x) if of_weight else None


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.dtype = bias.dtype
        return triton_linear.add_bias(_product(x, weight), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        x, weight = ctx.saved_tensors
        dy = grads[0].contiguous()
        of_factors = _gradients(dy, x, weight, ctx.needs_input_grad[:2])
        return *of_factors, triton_linear.row_sums(dy).to(ctx.dtype)


class LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        product = _product(x, weight)
        ctx.save_for_backward(x, weight, bias, product)
        return triton_linear.gelu(product, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        x, weight, bias, product = ctx.saved_tensors
        dy, dbias = triton_linear.gelu_backward(grads[0].contiguous(), product, bias)
        of_factors = _gradients(dy, x, weight, ctx.needs_input_grad[:2])
        return *of_factors, dbias.to(bias.dtype)


class LinearAddNorm(torch.autograd.Function):
    """A linear layer, added to a residual stream, and LayerNorm of the sum: (sum, norm)."""

    @staticmethod
    def forward(
        ctx: Any, residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor,
        gain: Tensor, shift: Tensor, eps: float, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, y = triton_norms.layer_norm(
            residual.contiguous(), _product(x, weight), bias, gain, shift, eps, dtype
        )
        ctx.save_for_backward(x, weight, total, gain)
        ctx.eps, ctx.dtype = eps, bias.dtype
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Grads:
        x, weight, total, gain = ctx.saved_tensors
        dtotal, dy = (None if grad is None else grad.contiguous() for grad in grads)
        if dy is None:
            dy = torch.zeros_like(total)
        dresidual, dproduct, sums = triton_norms.layer_norm_backward(
            dy, dtotal, total, gain, ctx.eps, x.dtype
        )
        dgain, dshift, dbias = sums.to(ctx.dtype)
        of_factors = _gradients(dproduct, x, weight, ctx.needs_input_grad[1:3])
        return dresidual, *of_factors, dbias, dgain, dshift, None, None


class LayerNormalisation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, eps: float, dtype: torch.dtype
    ) -> Tensor:
        x, y = triton_norms.layer_norm(x.contiguous(), None, None, gain, shift, eps, dtype)
        ctx.save_for_backward(x, gain)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        x, gain = ctx.saved_tensors
        dx, _, sums = triton_norms.layer_norm_backward(
            grads[0].contiguous(), None, x, gain, ctx.eps, None
        )
        dgain, dshift = sums.to(gain.dtype)
        return dx, dgain, dshift, None, None


def attends(queries: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether there are kernels for (samples, heads, tokens, width): of the same shapes, and lying
    alike."""
    alike = all(
        other.shape == queries.shape and other.stride() == queries.stride()
        for other in (keys, values)
    )
    return (
        alike
        and queries.ndim == 4
        and queries.stride(-1) == 1
        and hopper.usable(queries)
        and queries.shape[2] <= triton_attention.MOST_TOKENS
        and queries.shape[3] <= triton_attention.WIDEST
    )


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    y: Tensor = Attention.apply(queries, keys, values)
    return y


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        ctx.save_for_backward(queries, keys, values)
        return triton_attention.attention(queries, keys, values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Grads:
        return triton_attention.attention_backward(grads[0], *ctx.saved_tensors)
