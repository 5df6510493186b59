# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels for GroupNorm and LayerNorm of stacked models: every sample by itself.

GroupNorm's images are (n, B, H, W, C), LayerNorm's vectors (n, rows, D), weights (n, C) or (n, D),
all contiguous. Sums over samples, for the weights' gradients, have a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.engines.stacked.triton_kernels import jit, launch, pow2

# Not C and D: where they are multiples of 16, several values are loaded at a time.
_SIZES = ["rows", "B", "samples", "per_model", "per_tile"]


@triton.jit
def _over_group(values, LANES: tl.constexpr):
    """Of each lane, the sum over its group."""
    groups: tl.constexpr = values.shape[0] // LANES
    sums = tl.sum(values.reshape(groups, LANES), 1)
    return tl.broadcast_to(sums[:, None], (groups, LANES)).reshape(values.shape[0])


@triton.jit
def _dealt(C, G: tl.constexpr, LANES: tl.constexpr, BC: tl.constexpr):
    """Of each lane its number, group and channel, and whether it has one."""
    lane = tl.arange(0, BC)
    group = tl.program_id(1) * (BC // LANES) + lane // LANES
    if G == LANES:  # said so that the compiler sees that channels follow each other
        c = tl.program_id(1) * BC + lane
        here = c < C
    else:
        c = group * G + lane % LANES
        here = (lane % LANES < G) & (c < C)
    return lane, group, c, here


@jit(_SIZES)
def _group_norm_kernel(
    x, y, mean_out, inv_out, weight, bias, rows, B, C, eps,
    G: tl.constexpr, LANES: tl.constexpr, RELU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """One sample's groups, BC // LANES of them; a group of G channels has LANES lanes."""
    sample = tl.program_id(0)
    model = sample // B
    lane, group, c, here = _dealt(C, G, LANES, BC)
    x += sample.to(tl.int64) * rows * C
    y += sample.to(tl.int64) * rows * C
    shift = tl.load(x + c, mask=here, other=0.0).to(tl.float32)  # keeps the squares small
    sum_d = tl.zeros((BR, BC), tl.float32)
    sum_d2 = tl.zeros((BR, BC), tl.float32)
    for r0 in range(0, rows, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < rows)[:, None] & here[None, :]
        v = tl.load(x + r[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, v - shift[None, :], 0.0)
        sum_d += d
        sum_d2 += d * d
    count = rows.to(tl.float32) * G
    d = tl.sum(sum_d, 0) / rows
    m2 = tl.sum(sum_d2, 0) - d * d * rows
    own = tl.where(here, shift + d, 0.0)
    mean = _over_group(own, LANES) / G
    off = tl.where(here, own - mean, 0.0)
    inv = tl.rsqrt(_over_group(m2 + rows * off * off, LANES) / count + eps)
    place = sample * (C // G) + group
    tl.store(mean_out + place, mean, mask=here & (lane % LANES == 0))
    tl.store(inv_out + place, inv, mask=here & (lane % LANES == 0))
    scale = tl.load(weight + model * C + c, mask=here, other=0.0).to(tl.float32) * inv
    b = tl.load(bias + model * C + c, mask=here, other=0.0).to(tl.float32)
    for r0 in range(0, rows, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < rows)[:, None] & here[None, :]
        at = r[:, None] * C + c[None, :]
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        z = (v - mean[None, :]) * scale[None, :] + b[None, :]
        if RELU:
            z = tl.maximum(z, 0.0)
        tl.store(y + at, z.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _gradient_and_value(dy, x, mask, mean, inv, w, b, RELU: tl.constexpr):
    """The gradient before the ReLU, and the value it was given, normalised."""
    g = tl.load(dy, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    v = (v - mean[None, :]) * inv[None, :]
    if RELU:
        g = tl.where(v * w[None, :] + b[None, :] > 0.0, g, 0.0)
    return g, v


@jit(_SIZES)
def _group_norm_grad_kernel(
    x, dy, dx, part, mean_in, inv_in, weight, bias, samples, rows, B, C,
    G: tl.constexpr, LANES: tl.constexpr, RELU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The input's gradient, and one sample's part of those of weight and bias."""
    sample = tl.program_id(0)
    model = sample // B
    _lane, group, c, here = _dealt(C, G, LANES, BC)
    x += sample.to(tl.int64) * rows * C
    dy += sample.to(tl.int64) * rows * C
    dx += sample.to(tl.int64) * rows * C
    mean = tl.load(mean_in + sample * (C // G) + group, mask=here, other=0.0)
    inv = tl.load(inv_in + sample * (C // G) + group, mask=here, other=0.0)
    w = tl.load(weight + model * C + c, mask=here, other=0.0).to(tl.float32)
    b = tl.load(bias + model * C + c, mask=here, other=0.0).to(tl.float32)
    sum_g = tl.zeros((BR, BC), tl.float32)
    sum_gx = tl.zeros((BR, BC), tl.float32)
    for r0 in range(0, rows, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < rows)[:, None] & here[None, :]
        at = r[:, None] * C + c[None, :]
        g, v = _gradient_and_value(dy + at, x + at, mask, mean, inv, w, b, RELU)
        sum_g += g
        sum_gx += g * v
    of_bias = tl.sum(sum_g, 0)
    of_weight = tl.sum(sum_gx, 0)
    tl.store(part + sample * C + c, of_weight, mask=here)
    tl.store(part + (samples + sample) * C + c, of_bias, mask=here)
    count = rows.to(tl.float32) * G
    mean_g = _over_group(w * of_bias, LANES) / count
    mean_gx = _over_group(w * of_weight, LANES) / count
    for r0 in range(0, rows, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < rows)[:, None] & here[None, :]
        at = r[:, None] * C + c[None, :]
        g, v = _gradient_and_value(dy + at, x + at, mask, mean, inv, w, b, RELU)
        d = inv[None, :] * (g * w[None, :] - mean_g[None, :] - v * mean_gx[None, :])
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)


def _lanes(c: int, groups: int) -> dict[str, int]:
    """How a sample's channels are dealt out: several small groups to one program."""
    size = c // groups
    lanes = pow2(size)
    together = 1
    while lanes * together * 2 <= 64 and groups % (together * 2) == 0:
        together *= 2
    bc = max(lanes * together, 2)
    return {"G": size, "LANES": lanes, "BC": bc, "BR": max(1, 4096 // bc)}


def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, means, 1/standard deviations)."""
    n, batch, height, width, c = x.shape
    y = torch.empty_like(x)
    mean = x.new_empty(n, batch, groups, dtype=torch.float32)
    inv = torch.empty_like(mean)
    options = _lanes(c, groups)
    launch(
        _group_norm_kernel, (n * batch, groups * options["LANES"] // options["BC"]), x, y, mean,
        inv, weight, bias, height * width, batch, c, eps, **options, RELU=relu, num_warps=4,
    )  # fmt: skip
    return y, mean, inv


def group_norm_backward(
    dy: Tensor, x: Tensor, mean: Tensor, inv: Tensor, weight: Tensor, bias: Tensor, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, weight, bias)."""
    n, batch, height, width, c = x.shape
    groups = mean.shape[2]
    dx = torch.empty_like(x)
    part = x.new_empty(2, n, batch, c, dtype=torch.float32)
    options = _lanes(c, groups)
    launch(
        _group_norm_grad_kernel, (n * batch, groups * options["LANES"] // options["BC"]), x, dy,
        dx, part, mean, inv, weight, bias, n * batch, height * width, batch, c, **options,
        RELU=relu, num_warps=4,
    )  # fmt: skip
    of_weight, of_bias = part.sum(2)
    return dx, of_weight, of_bias


@triton.jit
def _standardised(v, mask, D, eps):
    """Rows with mean 0 and variance 1, and what they were divided by."""
    v = tl.where(mask, v - (tl.sum(v, 1) / D)[:, None], 0.0)
    inv = tl.rsqrt(tl.sum(v * v, 1) / D + eps)
    return v * inv[:, None], inv


@jit(_SIZES)
def _layer_norm_kernel(
    x, product, offset, total, y, weight, bias, per_model, D, eps,
    ADD: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    model = tl.program_id(1)
    d = tl.arange(0, BD)
    mask = (r < per_model)[:, None] & (d < D)[None, :]
    at = (model.to(tl.int64) * per_model + r)[:, None] * D + d[None, :]
    v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        v += tl.load(product + at, mask=mask, other=0.0).to(tl.float32)
        v += tl.load(offset + model * D + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
        tl.store(total + at, v.to(total.dtype.element_ty), mask=mask)
    v, _inv = _standardised(v, mask, D, eps)
    w = tl.load(weight + model * D + d, mask=d < D, other=0.0).to(tl.float32)
    b = tl.load(bias + model * D + d, mask=d < D, other=0.0).to(tl.float32)
    z = v * w[None, :] + b[None, :]
    tl.store(y + at, z.to(y.dtype.element_ty), mask=mask)


@jit(_SIZES)
def _layer_norm_grad_kernel(
    x, dy, dtotal, dx, dproduct, part, weight, per_model, per_tile, D, eps,
    ADD: tl.constexpr, ROUND: tl.constexpr, TOTAL: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The input's gradient, and ``per_tile`` rows' part of those of weight and bias. With TOTAL,
    the input has a gradient from elsewhere as well. With ADD, the input is a sum: also what
    ``per_tile`` rows add to the gradient of the offset in it; with ROUND, that of the product in
    it is the same, rounded."""
    tile = tl.program_id(0)
    model = tl.program_id(1)
    d = tl.arange(0, BD)
    start = model.to(tl.int64) * per_model
    w = tl.load(weight + model * D + d, mask=d < D, other=0.0).to(tl.float32)
    last = tl.minimum((tile + 1) * per_tile, per_model)
    of_weight = tl.zeros((BR, BD), tl.float32)
    of_bias = tl.zeros((BR, BD), tl.float32)
    of_offset = tl.zeros((BR, BD), tl.float32)
    for r0 in range(tile * per_tile, last, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < last)[:, None] & (d < D)[None, :]
        at = (start + r)[:, None] * D + d[None, :]
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        v, inv = _standardised(v, mask, D, eps)
        of_weight += g * v
        of_bias += g
        g *= w[None, :]
        mean_g = tl.sum(g, 1) / D
        mean_gv = tl.sum(g * v, 1) / D
        out = inv[:, None] * (g - mean_g[:, None] - v * mean_gv[:, None])
        if TOTAL:
            out += tl.load(dtotal + at, mask=mask, other=0.0).to(tl.float32)
        if ROUND:
            tl.store(dproduct + at, out.to(dproduct.dtype.element_ty), mask=mask)
        if ADD:
            of_offset += tl.where(mask, out, 0.0)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
    tiles = tl.num_programs(0)
    to = part + (model * tiles + tile) * D + d
    size = tl.num_programs(1) * tiles * D
    tl.store(to, tl.sum(of_weight, 0), mask=d < D)
    tl.store(to + size, tl.sum(of_bias, 0), mask=d < D)
    if ADD:
        tl.store(to + 2 * size, tl.sum(of_offset, 0), mask=d < D)


PROGRAMS = 1056
"""That LayerNorm's gradient is dealt out to: the fastest measured on an H200."""


def _rows_at_once(width: int, rows: int) -> dict[str, int]:
    """``rows`` of 256 numbers in one warp, more of shorter ones, or more warps."""
    bd = max(16, pow2(width))
    warps = min(16, max(1, bd // 256))
    return {"BR": rows * max(1, 256 // bd), "BD": bd, "num_warps": warps}


def layer_norm(
    x: Tensor, product: Tensor | None, offset: Tensor | None, weight: Tensor, bias: Tensor,
    eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of (n, rows, D), or of the total of x, a product of that shape and its offset (n, D).

    (what was normalised, the result).
    """
    n, rows, width = x.shape
    y = torch.empty_like(x, dtype=dtype)
    total = x if product is None else torch.empty_like(x)
    options = _rows_at_once(width, 2)
    launch(
        _layer_norm_kernel, (triton.cdiv(rows, options["BR"]), n), x,
        x if product is None else product, bias if offset is None else offset, total, y,
        weight, bias, rows, width, eps, ADD=product is not None, **options,
    )  # fmt: skip
    return total, y


def layer_norm_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, eps: float,
    product: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of what was normalised, x, and of a product of that precision in it; and of
    (weight, bias, offset) one below the other. ``dtotal``: what x has as a gradient already."""
    n, rows, width = x.shape
    options = _rows_at_once(width, 4)
    per_tile = max(options["BR"], triton.cdiv(rows * n, PROGRAMS))
    tiles = triton.cdiv(rows, per_tile)
    dx = torch.empty_like(x)
    rounds = product not in (None, x.dtype)
    dproduct = torch.empty_like(x, dtype=product) if rounds else dx
    part = x.new_empty(2 if product is None else 3, n, tiles, width, dtype=torch.float32)
    launch(
        _layer_norm_grad_kernel, (tiles, n), x, dy, dx if dtotal is None else dtotal, dx, dproduct,
        part, weight, rows, per_tile, width, eps, ADD=product is not None, ROUND=rounds,
        TOTAL=dtotal is not None, **options,
    )  # fmt: skip
    return dx, dproduct, part.sum(2)
