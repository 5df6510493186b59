# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"
"""A Triton kernel that gathers what a convolution's kernel sees, for a matrix product."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from perfed.engines.stacked.triton_kernels import Geometry, Pair, jit, launch, pow2

_SIZES = [
    "rows", "taps", "TH", "TW", "SH", "SW", "KW", "blocks", "stride_h", "stride_w", "pad_h",
    "pad_w", "dil_h", "dil_w",
]  # fmt: skip


@jit(_SIZES)
def _patches_kernel(
    x, out, rows, C, taps, TH, TW, SH, SW, KW, blocks,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Some places of one tap, from images of SH×SW; places are TH×TW. All taps of the same places
    run at the same time: they read the same pixels."""
    model = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0) % (taps * blocks)
    tap = part // blocks
    c = part % blocks * BC + tl.arange(0, BC)
    r = tl.program_id(0) // (taps * blocks) * BR + tl.arange(0, BR)
    h = r // TW % TH * stride_h - pad_h + tap // KW * dil_h
    w = r % TW * stride_w - pad_w + tap % KW * dil_w
    known = (r < rows)[:, None] & (c < C)[None, :]
    inside = known & ((h >= 0) & (h < SH) & (w >= 0) & (w < SW))[:, None]
    there = (r // (TH * TW) * SH + h) * SW + w
    x += model * (rows // (TH * TW)) * SH * SW * C
    value = tl.load(x + there[:, None] * C + c[None, :], mask=inside, other=0.0)
    out += model * rows * taps * C
    tl.store(out + r.to(tl.int64)[:, None] * taps * C + tap * C + c[None, :], value, mask=known)


def patches(x: Tensor, kernel: Pair, size: Pair, geometry: Geometry) -> Tensor:
    """Of images (n, B, H, W, C), at places of this size: (n, places, kh·kw·C). Padding and dilation
    may be negative: so a gradient's patches are seen."""
    n, batch, height, width, c = x.shape
    rows, taps = batch * size[0] * size[1], kernel[0] * kernel[1]
    out = x.new_empty(n, rows, taps * c)
    bc = min(128, pow2(c))
    br, blocks = 2048 // bc, triton.cdiv(c, bc)
    stride, padding, dilation = geometry
    launch(
        _patches_kernel, (triton.cdiv(rows, br) * taps * blocks, n), x, out, rows, c, taps,
        *size, height, width, kernel[1], blocks, *stride, *padding, *dilation, BR=br, BC=bc,
        num_warps=4,
    )  # fmt: skip
    return out
