# mypy: disable-error-code="import-not-found, no-untyped-def, assignment, var-annotated"
# mypy: allow-untyped-decorators, allow-untyped-calls
"""Triton kernels for depthwise convolution of stacked models: each channel has a kernel of its own.

Images are (n, B, H, W, C), weights (n, kh·kw, C), all contiguous. There is little arithmetic: what
counts is to read each image once from memory, and seldom from the cache. A program takes several
rows of several columns; what it has loaded of a row serves every row of the result that sees it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.engines.stacked.triton_kernels import (
    Geometry,
    Moments,
    Pair,
    _output_size,
    block_of,
    jit,
    launch,
)

# Not C: where it is a multiple of 16, channels are loaded eight at a time.
SIZES = ["columns", "bands", "blocks", "groups", "per_split", "TH", "TW", "SH", "SW"]


@triton.jit
def source(at, tap, pad, size, STRIDE: tl.constexpr, DIL: tl.constexpr, FORWARD: tl.constexpr):
    """Where a tap looks for place ``at``, and whether it finds something there."""
    if FORWARD:
        there = at * STRIDE - pad + tap * DIL
        return there, (there >= 0) & (there < size)
    reached = at + pad - tap * DIL
    there = reached // STRIDE
    return there, (reached >= 0) & (reached % STRIDE == 0) & (there < size)


@triton.jit
def band(
    columns, bands, blocks, C, TW, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """What a program has: its tile's number, channels, images and columns, first row, and which of
    them are there."""
    tile = tl.program_id(0) // blocks
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    at = tile // bands * BR + tl.arange(0, BR)
    known = (at < columns)[:, None] & (c < C)[None, :]
    return tile, c, at // TW, at % TW, tile % bands * ROWS, known


@triton.jit
def _zeros(COUNT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    values = ()
    for _ in tl.static_range(COUNT):
        values += (tl.zeros((BR, BC), tl.float32),)
    return values


@jit(SIZES)
def _depthwise_kernel(
    x, w, bias, y, part, columns, bands, blocks, C, TH, TW, SH, SW,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, FORWARD: tl.constexpr, HAS_BIAS: tl.constexpr,
    MOMENTS: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A band of ROWS rows and BR columns, of one or several images of TH×TW, from those of SH×SW:
    the convolution, or the gradient of its input, which goes the other way. The band's first row
    sees those from LOW to HIGH of the source, counted from where it lies itself."""
    tile, c, image, v, h0, known = band(columns, bands, blocks, C, TW, ROWS, BR, BC)
    model = tl.program_id(1)
    images = columns // TW
    x += model.to(tl.int64) * images * SH * SW * C
    y += model.to(tl.int64) * images * TH * TW * C
    w += model * (KH * KW) * C + c
    start = h0 * SY if FORWARD else h0 // SY
    values = ()  # all of them, before any is used: reading them takes the time
    for j in tl.static_range(KW):
        from_w, in_w = source(v, j, PX, SW, SX, DX, FORWARD)
        there = x + (((image * SH + start) * SW + from_w) * C)[:, None] + c[None, :]
        for s in tl.static_range(LOW, HIGH + 1):
            inside = in_w & (start + s >= 0) & (start + s < SH)
            values += (tl.load(there + s * SW * C, mask=known & inside[:, None], other=0.0),)
    acc = _zeros(ROWS, BR, BC)
    for j in tl.static_range(KW):
        for s in tl.static_range(LOW, HIGH + 1):
            value = values[j * (HIGH + 1 - LOW) + s - LOW].to(tl.float32)
            added = ()
            for r in tl.static_range(ROWS):
                total = acc[r]
                for i in tl.static_range(KH):
                    if (FORWARD and r * SY + i * DY - PY == s) or (
                        not FORWARD and r + PY - i * DY == s * SY
                    ):
                        weight = tl.load(w + (i * KW + j) * C, mask=c < C, other=0.0)
                        total += value * weight.to(tl.float32)[None, :]
                added += (total,)
            acc = added
    if HAS_BIAS:
        shift = tl.load(bias + model * C + c, mask=c < C, other=0.0).to(tl.float32)
        shifted = ()
        for r in tl.static_range(ROWS):
            shifted += (acc[r] + shift[None, :],)
        acc = shifted
    if MOMENTS:
        total = tl.zeros((BR, BC), tl.float32)
        for r in tl.static_range(ROWS):
            total += acc[r]
        mean = tl.sum(total, 0) / (ROWS * BR)
        square = tl.zeros((BR, BC), tl.float32)
        for r in tl.static_range(ROWS):  # from the mean: plain squares say little where it is large
            square += (acc[r] - mean[None, :]) * (acc[r] - mean[None, :])
        m2 = tl.sum(square, 0)
        tiles = tl.num_programs(0) // blocks
        to = part + (model * tiles + tile) * 2 * C + c
        tl.store(to, mean, mask=c < C)
        tl.store(to + C, m2, mask=c < C)
    to = y + (((image * TH + h0) * TW + v) * C)[:, None] + c[None, :]
    for r in tl.static_range(ROWS):
        tl.store(to + r * TW * C, acc[r].to(y.dtype.element_ty), mask=known & (h0 + r < TH))


@jit(SIZES)
def _depthwise_weight_kernel(
    x, dy, out, columns, blocks, groups, per_split, C, TH, TW, SH, SW,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """All taps of a block of channels, over one share (split) of the groups of BR columns; ROWS
    rows of the gradient at a time."""
    split = tl.program_id(0) // blocks
    model = tl.program_id(1)
    c = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    images = columns // TW
    x += model.to(tl.int64) * images * SH * SW * C
    dy += model.to(tl.int64) * images * TH * TW * C
    acc = _zeros(KH * KW, BR, BC)
    for group in range(split * per_split, tl.minimum((split + 1) * per_split, groups)):
        at = group * BR + tl.arange(0, BR)
        image = at // TW
        v = at % TW
        known = (at < columns)[:, None] & (c < C)[None, :]
        of_image = dy + ((image * TH * TW + v) * C)[:, None] + c[None, :]
        for h0 in range(0, TH, ROWS):
            g = ()
            for r in tl.static_range(ROWS):
                mask = known & (h0 + r < TH)
                one = tl.load(of_image + (h0 + r) * TW * C, mask=mask, other=0.0)
                g += (one.to(tl.float32),)
            for j in tl.static_range(KW):
                from_w, in_w = source(v, j, PX, SW, SX, DX, True)
                there = x + (((image * SH + h0 * SY) * SW + from_w) * C)[:, None] + c[None, :]
                for s in tl.static_range(LOW, HIGH + 1):
                    inside = in_w & (h0 * SY + s >= 0) & (h0 * SY + s < SH)
                    value = tl.load(there + s * SW * C, mask=known & inside[:, None], other=0.0)
                    value = value.to(tl.float32)
                    added = ()
                    for k in tl.static_range(KH * KW):
                        total = acc[k]
                        for r in tl.static_range(ROWS):
                            if k % KW == j and r * SY + k // KW * DY - PY == s:
                                total += g[r] * value
                        added += (total,)
                    acc = added
    to = out + ((split * tl.num_programs(1) + model) * C + c) * (KH * KW)
    for k in tl.static_range(KH * KW):
        tl.store(to + k, tl.sum(acc[k], 0), mask=c < C)


def constants(kernel: Pair, geometry: Geometry, rows: int, forward: bool) -> dict[str, int]:
    """With the rows of the source that ``rows`` rows see, the first and the last."""
    (sy, sx), (py, px), (dy, dx) = geometry
    reach = (kernel[0] - 1) * dy
    if forward:
        low, high = -py, (rows - 1) * sy + reach - py
    else:
        low, high = -((reach - py) // sy), (rows - 1 + py) // sy
    return {
        "KH": kernel[0], "KW": kernel[1], "SY": sy, "SX": sx, "PY": py, "PX": px, "DY": dy,
        "DX": dx, "LOW": low, "HIGH": high, "ROWS": rows,
    }  # fmt: skip


ENTRIES = 1024
"""Of a row that a program works on at once: eight for each of its threads."""

ROWS = 4
"""Of a result that a program works on at once."""

GRADIENT_ROWS = 4
"""Of the gradient that a program looks at at once for the weights' gradient."""


def by_tap(w: Tensor) -> Tensor:
    """(n, C, kh, kw) → (n, kh·kw, C), so that those of neighbouring channels are neighbours."""
    return w.flatten(2).mT.contiguous()


def _run(
    x: Tensor, w: Tensor, kernel: Pair, bias: Tensor | None, y: Tensor, geometry: Geometry,
    forward: bool,
) -> Moments | None:  # fmt: skip
    n, batch, height, width, c = y.shape
    stride = geometry[0][0]
    rows = ROWS if stride == 1 else 2 if forward else 2 * stride
    bc = block_of(c, 64, c // 8)
    br = ENTRIES // bc
    columns, bands, blocks = batch * width, triton.cdiv(height, rows), triton.cdiv(c, bc)
    tiles = triton.cdiv(columns, br) * bands
    moments = None
    if forward and columns % br == 0 and height % rows == 0:
        part = x.new_empty(n, tiles, 2, c, dtype=torch.float32)
        moments = Moments(part, br * rows, br * height)
    launch(
        _depthwise_kernel, (tiles * blocks, n), x, w, w if bias is None else bias, y,
        w if moments is None else moments.part, columns, bands, blocks, c, height, width,
        *x.shape[2:4], **constants(kernel, geometry, rows, forward), FORWARD=forward,
        HAS_BIAS=bias is not None, MOMENTS=moments is not None, BR=br, BC=bc,
        num_warps=ENTRIES // 256,
    )  # fmt: skip
    return moments


def depthwise_forward(
    x: Tensor, w: Tensor, kernel: Pair, bias: Tensor | None, geometry: Geometry
) -> tuple[Tensor, Moments | None]:
    size = _output_size(x.shape[2:4], kernel, geometry)
    y = x.new_empty(*x.shape[:2], *size, x.shape[4])
    return y, _run(x, w, kernel, bias, y, geometry, True)


def depthwise_input_grad(
    dy: Tensor, w: Tensor, kernel: Pair, size: Pair, geometry: Geometry
) -> Tensor:
    dx = dy.new_empty(*dy.shape[:2], *size, dy.shape[4])
    _run(dy, w, kernel, None, dx, geometry, False)
    return dx


def depthwise_weight_grad(x: Tensor, dy: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    n, batch, height, width, c = dy.shape
    bc = block_of(c, 64, c // 8)
    br = ENTRIES // bc
    columns, blocks = batch * width, triton.cdiv(c, bc)
    groups = triton.cdiv(columns, br)
    splits = min(groups, triton.cdiv(1056, n * blocks))
    per_split = triton.cdiv(groups, splits)
    splits = triton.cdiv(groups, per_split)
    out = x.new_empty(splits, n, c, *kernel, dtype=torch.float32)
    options = constants(kernel, geometry, GRADIENT_ROWS, True)
    launch(
        _depthwise_weight_kernel, (splits * blocks, n), x, dy, out, columns, blocks, groups,
        per_split, c, height, width, *x.shape[2:4], **options, BR=br, BC=bc,
        num_warps=ENTRIES // 256,
    )  # fmt: skip
    return out.sum(0).to(x.dtype)
