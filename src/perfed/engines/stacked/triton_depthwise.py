# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels for depthwise convolution of stacked models: each channel has a kernel of its own.

Images are (n, B, H, W, C), weights (n, C, kh, kw), all contiguous. There is little arithmetic:
what counts is to read each image once, neighbours from the cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.engines.stacked.triton_kernels import (
    Geometry,
    Moments,
    Pair,
    _output_size,
    jit,
    launch,
    pow2,
)

# Not C: where it is a multiple of 16, channels are loaded eight at a time.
_SIZES = ["rows", "per_split", "tiles", "TH", "TW", "SH", "SW", "pad_h", "pad_w"]


@triton.jit
def _source(at, tap, pad, size, STRIDE: tl.constexpr, DIL: tl.constexpr, FORWARD: tl.constexpr):
    """Where a tap looks for place ``at``, and whether it finds something there."""
    if FORWARD:
        there = at * STRIDE - pad + tap * DIL
        return there, (there >= 0) & (there < size)
    reached = at + pad - tap * DIL
    there = reached // STRIDE
    return there, (reached >= 0) & (reached % STRIDE == 0) & (there < size)


@jit(_SIZES)
def _depthwise_kernel(
    x, w, bias, y, part, rows, tiles, C, TH, TW, SH, SW, pad_h, pad_w,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    DY: tl.constexpr, DX: tl.constexpr, FORWARD: tl.constexpr, HAS_BIAS: tl.constexpr,
    MOMENTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Forward from images of SH×SW to TH×TW; or the gradient of the input, the other way."""
    tile = tl.program_id(0)
    model = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    r = tile * BR + tl.arange(0, BR)
    image = r // (TH * TW)
    h = r // TW % TH
    v = r % TW
    known = (r < rows)[:, None] & (c < C)[None, :]
    x += model.to(tl.int64) * (rows // (TH * TW)) * SH * SW * C
    acc = tl.zeros((BR, BC), tl.float32)
    for i in tl.static_range(KH):
        from_h, in_h = _source(h, i, pad_h, SH, SY, DY, FORWARD)
        for j in tl.static_range(KW):
            from_w, in_w = _source(v, j, pad_w, SW, SX, DX, FORWARD)
            there = (image * SH + from_h) * SW + from_w
            inside = known & (in_h & in_w)[:, None]
            value = tl.load(x + there[:, None] * C + c[None, :], mask=inside, other=0.0)
            weight = tl.load(w + (model * (KH * KW) + i * KW + j) * C + c, mask=c < C, other=0.0)
            acc += value.to(tl.float32) * weight.to(tl.float32)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + model * C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    if MOMENTS:
        mean = tl.sum(acc, 0) / BR
        d = acc - mean[None, :]
        at = part + (model * tiles + tile) * 2 * C + c
        tl.store(at, mean, mask=c < C)
        tl.store(at + C, tl.sum(d * d, 0), mask=c < C)
    y += model.to(tl.int64) * rows * C
    tl.store(y + r[:, None] * C + c[None, :], acc.to(y.dtype.element_ty), mask=known)


@jit(_SIZES)
def _depthwise_weight_kernel(
    x, dy, out, rows, per_split, C, TH, TW, SH, SW, pad_h, pad_w,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    DY: tl.constexpr, DX: tl.constexpr, TAPS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """All taps of a block of channels, over one share (split) of the positions."""
    split = tl.program_id(0)
    model = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    x += model.to(tl.int64) * (rows // (TH * TW)) * SH * SW * C
    dy += model.to(tl.int64) * rows * C
    tap = tl.arange(0, TAPS)
    acc = tl.zeros((TAPS, BR, BC), tl.float32)
    last = tl.minimum((split + 1) * per_split, rows)
    for start in range(split * per_split, last, BR):
        r = start + tl.arange(0, BR)
        image = r // (TH * TW)
        h = r // TW % TH
        v = r % TW
        known = (r < last)[:, None] & (c < C)[None, :]
        g = tl.load(dy + r[:, None] * C + c[None, :], mask=known, other=0.0).to(tl.float32)
        from_h, in_h = _source(h[None, :], (tap // KW)[:, None], pad_h, SH, SY, DY, True)
        from_w, in_w = _source(v[None, :], (tap % KW)[:, None], pad_w, SW, SX, DX, True)
        there = (image[None, :] * SH + from_h) * SW + from_w
        inside = in_h & in_w & (tap < KH * KW)[:, None] & (r < last)[None, :]
        value = tl.load(x + there[:, :, None] * C + c[None, None, :],
                        mask=inside[:, :, None] & (c < C)[None, None, :], other=0.0)  # fmt: skip
        acc += g[None, :, :] * value.to(tl.float32)
    base = out + ((split * tl.num_programs(1) + model) * C + c) * (KH * KW)
    mask = (c < C)[None, :] & (tap < KH * KW)[:, None]
    tl.store(base[None, :] + tap[:, None], tl.sum(acc, 1), mask=mask)


def _constants(kernel: Pair, geometry: Geometry) -> dict[str, int]:
    (sy, sx), _, (dy, dx) = geometry
    return {"KH": kernel[0], "KW": kernel[1], "SY": sy, "SX": sx, "DY": dy, "DX": dx}


def _block(c: int) -> int:
    return min(64, max(16, pow2(c)))


def _run(
    x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, geometry: Geometry, forward: bool
) -> Moments | None:
    n, batch, height, width, c = y.shape
    rows, br, bc = batch * height * width, 64, _block(c)
    tiles = triton.cdiv(rows, br)
    by_tap = w.flatten(2).mT.contiguous()  # so that those of neighbouring channels are neighbours
    moments = None
    if forward and rows % br == 0:
        moments = Moments(x.new_empty(n, tiles, 2, c, dtype=torch.float32), br)
    launch(
        _depthwise_kernel, (tiles, n, triton.cdiv(c, bc)), x, by_tap,
        w if bias is None else bias, y, w if moments is None else moments.part, rows, tiles, c,
        height, width, *x.shape[2:4], *geometry[1],
        **_constants((w.shape[2], w.shape[3]), geometry), FORWARD=forward,
        HAS_BIAS=bias is not None, MOMENTS=moments is not None, BR=br, BC=bc, num_warps=4,
    )  # fmt: skip
    return moments


def depthwise_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry
) -> tuple[Tensor, Moments | None]:
    size = _output_size(x.shape[2:4], w.shape[2:], geometry)
    y = x.new_empty(*x.shape[:2], *size, x.shape[4])
    return y, _run(x, w, bias, y, geometry, True)


def depthwise_input_grad(dy: Tensor, w: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    dx = dy.new_empty(*dy.shape[:2], *size, dy.shape[4])
    _run(dy, w, None, dx, geometry, False)
    return dx


def depthwise_weight_grad(x: Tensor, dy: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    n, batch, height, width, c = dy.shape
    taps, bc = pow2(kernel[0] * kernel[1]), _block(c)
    rows, br = batch * height * width, max(2, 128 // taps)
    blocks = n * triton.cdiv(c, bc)
    splits = max(1, min(triton.cdiv(2112, blocks), rows // (32 * br)))
    per_split = triton.cdiv(triton.cdiv(rows, splits), br) * br
    splits = triton.cdiv(rows, per_split)
    out = x.new_empty(splits, n, c, *kernel, dtype=torch.float32)
    options: dict[str, Any] = _constants(kernel, geometry)
    launch(
        _depthwise_weight_kernel, (splits, n, triton.cdiv(c, bc)), x, dy, out, rows, per_split, c,
        height, width, *x.shape[2:4], *geometry[1], **options, TAPS=taps, BR=br, BC=bc,
        num_warps=8,
    )  # fmt: skip
    return out.sum(0).to(x.dtype)
