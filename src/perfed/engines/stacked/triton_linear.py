# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels for what surrounds the matrix products of linear layers.

Adding a bias costs one more pass over a product, so it is added where the product is read next:
in a GELU. A bias has a sum over rows as its gradient: it is taken on the way back through the GELU.

Rows are (n, rows, C), contiguous, biases (n, C). Sums have a fixed order, and are in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.engines.stacked.triton_kernels import jit, launch, pow2

_SIZES = ["rows", "per_tile"]


@triton.jit
def _normal(v):
    """Of the normal distribution, the share below v, and the density there.

    By Abramowitz and Stegun's formula 7.1.26, whose error is below 2e-7: it needs the same
    exponential as the density, and a third of the time of an exact error function.
    """
    density = tl.exp(-0.5 * v * v)
    t = 1.0 / (1.0 + 0.2316418882663604 * tl.abs(v))
    series = 1.421413741 + t * (-1.453152027 + t * 1.061405429)
    tail = 0.5 * density * t * (0.254829592 + t * (-0.284496736 + t * series))
    return tl.where(v > 0, 1.0 - tail, tail), density * 0.3989422804014327


@jit(_SIZES)
def _bias_kernel(
    x, bias, y, rows, C, GELU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    model = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    mask = (r < rows)[:, None] & (c < C)[None, :]
    at = (model.to(tl.int64) * rows + r)[:, None] * C + c[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    v += tl.load(bias + model * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if GELU:
        below, _density = _normal(v)
        v *= below
    tl.store(y + at, v.to(y.dtype.element_ty), mask=mask)


@jit(_SIZES)
def _sums_kernel(
    x, bias, dy, dx, part, rows, per_tile, C,
    GELU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """BC channels' sums over ``per_tile`` rows; before, back through a GELU of x and a bias."""
    tile = tl.program_id(0)
    model = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    start = model.to(tl.int64) * rows
    b = tl.load(bias + model * C + c, mask=c < C, other=0.0).to(tl.float32)
    last = tl.minimum((tile + 1) * per_tile, rows)
    sums = tl.zeros((BR, BC), tl.float32)
    for r0 in range(tile * per_tile, last, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < last)[:, None] & (c < C)[None, :]
        at = (start + r)[:, None] * C + c[None, :]
        g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        if GELU:
            v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + b[None, :]
            below, density = _normal(v)
            g *= below + v * density
            tl.store(dx + at, g.to(dx.dtype.element_ty), mask=mask)
        sums += g
    to = part + (model * tl.num_programs(0) + tile) * C + c
    tl.store(to, tl.sum(sums, 0), mask=c < C)


# The fastest measured on an H200. Sums are dealt out to so many programs.
BIASED = {"BR": 16, "num_warps": 4}
GELU_SUMS, GELU_PROGRAMS = {"BR": 8, "num_warps": 4}, 1056
SUMS, PROGRAMS = {"BR": 4, "num_warps": 1}, 2112


def gelu(x: Tensor, bias: Tensor) -> Tensor:
    """Of x + bias."""
    return _biased(x, bias, torch.empty_like(x), True)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """In place."""
    return _biased(x, bias, x, False)


def _biased(x: Tensor, bias: Tensor, y: Tensor, gelu: bool) -> Tensor:
    n, rows, c = x.shape
    bc = min(256, max(16, pow2(c)))
    launch(
        _bias_kernel, (triton.cdiv(rows, BIASED["BR"]), n, triton.cdiv(c, bc)), x, bias, y, rows, c,
        GELU=gelu, BC=bc, **BIASED,
    )  # fmt: skip
    return y


def gelu_backward(dy: Tensor, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias."""
    dx = torch.empty_like(x)
    return dx, _summed(x, bias, dy, dx, True)


def row_sums(dy: Tensor) -> Tensor:
    """Of (n, rows, C), the sum over rows."""
    return _summed(dy, dy, dy, dy, False)


def _summed(x: Tensor, bias: Tensor, dy: Tensor, dx: Tensor, gelu: bool) -> Tensor:
    n, rows, c = dy.shape
    options, programs = (GELU_SUMS, GELU_PROGRAMS) if gelu else (SUMS, PROGRAMS)
    bc = min(256, max(16, pow2(c)))
    blocks = n * triton.cdiv(c, bc)
    per_tile = max(options["BR"], triton.cdiv(rows * blocks, programs))
    tiles = triton.cdiv(rows, per_tile)
    part = dy.new_empty(n, tiles, c, dtype=torch.float32)
    launch(
        _sums_kernel, (tiles, n, triton.cdiv(c, bc)), x, bias, dy, dx, part, rows, per_tile, c,
        GELU=gelu, BC=bc, **options,
    )  # fmt: skip
    return part.sum(1)
