# mypy: disable-error-code="import-not-found, no-untyped-def, assignment, var-annotated"
# mypy: allow-untyped-decorators, allow-untyped-calls
"""Triton kernels for max pooling of stacked models whose windows may overlap.

Images are (n, B, H, W, C), contiguous. Programs take bands of rows, as those for depthwise
convolution do (:mod:`.triton_depthwise`). Beside each maximum, one byte says which of its window's
places it came from: the gradient needs nothing else.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perfed.engines.stacked.triton_depthwise import ENTRIES, SIZES, band, constants, source
from perfed.engines.stacked.triton_kernels import (
    Geometry,
    Pair,
    _output_size,
    block_of,
    jit,
    launch,
)


@jit(SIZES)
def _max_pool_kernel(
    x, y, places, columns, bands, blocks, C, TH, TW, SH, SW,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Of equal values the first counts, and a number that is none counts most, as in PyTorch."""
    _, c, image, v, h0, known = band(columns, bands, blocks, C, TW, ROWS, BR, BC)
    model = tl.program_id(1)
    images = columns // TW
    x += model.to(tl.int64) * images * SH * SW * C
    best = ()
    place = ()
    for _ in tl.static_range(ROWS):
        best += (tl.full((BR, BC), float("-inf"), tl.float32),)
        place += (tl.full((BR, BC), KH * KW, tl.int32),)
    for j in tl.static_range(KW):
        from_w, in_w = source(v, j, PX, SW, SX, DX, True)
        there = x + (((image * SH + h0 * SY) * SW + from_w) * C)[:, None] + c[None, :]
        for s in tl.static_range(LOW, HIGH + 1):
            inside = in_w & (h0 * SY + s >= 0) & (h0 * SY + s < SH)
            value = tl.load(there + s * SW * C, mask=known & inside[:, None], other=float("-inf"))
            value = value.to(tl.float32)
            higher = ()
            chosen = ()
            for r in tl.static_range(ROWS):
                top = best[r]
                where = place[r]
                for i in tl.static_range(KH):
                    if r * SY + i * DY - PY == s:
                        wins = (value > top) | (value != value)
                        wins |= (value == top) & (where > i * KW + j)
                        top = tl.where(wins, value, top)
                        where = tl.where(wins, i * KW + j, where)
                higher += (top,)
                chosen += (where,)
            best = higher
            place = chosen
    to = (((image * TH + h0) * TW + v) * C)[:, None] + c[None, :]
    to += model.to(tl.int64) * images * TH * TW * C
    for r in tl.static_range(ROWS):
        mask = known & (h0 + r < TH)
        tl.store(y + to + r * TW * C, best[r].to(y.dtype.element_ty), mask=mask)
        tl.store(places + to + r * TW * C, place[r].to(tl.uint8), mask=mask)


@jit(SIZES)
def _max_pool_grad_kernel(
    dy, places, dx, columns, bands, blocks, C, TH, TW, SH, SW,
    KH: tl.constexpr, KW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr,
    PY: tl.constexpr, PX: tl.constexpr, DY: tl.constexpr, DX: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Every place asks the windows that see it whether their maximum came from there."""
    _, c, image, v, h0, known = band(columns, bands, blocks, C, TW, ROWS, BR, BC)
    model = tl.program_id(1)
    images = columns // TW
    dy += model.to(tl.int64) * images * SH * SW * C
    places += model.to(tl.int64) * images * SH * SW * C
    acc = ()
    for _ in tl.static_range(ROWS):
        acc += (tl.zeros((BR, BC), tl.float32),)
    for j in tl.static_range(KW):
        from_w, in_w = source(v, j, PX, SW, SX, DX, False)
        there = (((image * SH + h0 // SY) * SW + from_w) * C)[:, None] + c[None, :]
        for s in tl.static_range(LOW, HIGH + 1):
            inside = in_w & (h0 // SY + s >= 0) & (h0 // SY + s < SH)
            mask = known & inside[:, None]
            g = tl.load(dy + there + s * SW * C, mask=mask, other=0.0).to(tl.float32)
            place = tl.load(places + there + s * SW * C, mask=mask, other=KH * KW).to(tl.int32)
            added = ()
            for r in tl.static_range(ROWS):
                total = acc[r]
                for i in tl.static_range(KH):
                    if r + PY - i * DY == s * SY:
                        total += tl.where(place == i * KW + j, g, 0.0)
                added += (total,)
            acc = added
    to = (((image * TH + h0) * TW + v) * C)[:, None] + c[None, :]
    dx += model.to(tl.int64) * images * TH * TW * C
    for r in tl.static_range(ROWS):
        mask = known & (h0 + r < TH)
        tl.store(dx + to + r * TW * C, acc[r].to(dx.dtype.element_ty), mask=mask)


def _run(
    kernel: object, given: tuple[Tensor, ...], size: Pair, target: Tensor, window: Pair,
    geometry: Geometry, forward: bool,
) -> None:  # fmt: skip
    n, batch, height, width, c = target.shape
    rows = 2 if forward else 2 * geometry[0][0]
    bc = block_of(c, 64, c // 8)
    br = ENTRIES // bc
    columns, bands, blocks = batch * width, triton.cdiv(height, rows), triton.cdiv(c, bc)
    launch(
        kernel, (triton.cdiv(columns, br) * bands * blocks, n), *given, columns, bands, blocks, c,
        height, width, *size, **constants(window, geometry, rows, forward), BR=br, BC=bc,
        num_warps=ENTRIES // 256,
    )  # fmt: skip


def max_pool(x: Tensor, window: Pair, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The maxima, and of each which place of its window it came from."""
    size = x.shape[2], x.shape[3]
    y = x.new_empty(*x.shape[:2], *_output_size(size, window, geometry), x.shape[4])
    places = torch.empty_like(y, dtype=torch.uint8)
    _run(_max_pool_kernel, (x, y, places), size, y, window, geometry, True)
    return y, places


def max_pool_backward(
    dy: Tensor, places: Tensor, size: Pair, window: Pair, geometry: Geometry
) -> Tensor:
    dx = dy.new_empty(*dy.shape[:2], *size, dy.shape[4])
    source_size = dy.shape[2], dy.shape[3]
    _run(_max_pool_grad_kernel, (dy, places, dx), source_size, dx, window, geometry, False)
    return dx
