# mypy: disable-error-code="import-not-found, no-untyped-def, assignment"
# mypy: allow-untyped-decorators, allow-untyped-calls
# ruff: noqa: E741 -- O counts output channels
"""Triton kernels over stacked models (dim 0 of every tensor is the model), for Hopper GPUs.

Activations are (n, B, H, W, C), weights (n, O, kh, kw, C), all contiguous. Every reduction has a
fixed order (partial sums, then a second kernel), so results do not change between runs.
Nothing is autotuned: tile shapes follow from the tensor shapes, and each kernel compiles in
well under a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad
from triton.tools.tensor_descriptor import TensorDescriptor

# ------------------------------------------------------------------------------- convolution


Pair = tuple[int, int]
Geometry = tuple[Pair, Pair, Pair]  # stride, padding, dilation

_CONV_SIZES = [
    "B", "C", "O", "k_blocks", "KH", "KW", "off_h", "off_w", "dil_h", "dil_w", "tiles_h", "tiles_w",
    "tiles_n", "tiles_b",
]  # fmt: skip
_WEIGHT_SIZES = [
    "B", "positions", "KW", "off_h", "off_w", "dil_h", "dil_w", "tiles_h", "tiles_w", "tiles_b",
    "tiles_o", "tiles_c", "taps", "per_split",
]  # fmt: skip
_ROW_SIZES = ["populations", "first_rows", "rows", "chunks0", "chunks", "per_chunk", "W",
              "first_count", "count"]  # fmt: skip


def jit(sizes: list[str]) -> Any:
    """``triton.jit`` that does not compile anew for sizes that happen to be 1 or 16·k."""

    def wrap(function: Any) -> Any:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        return triton.jit(function, do_not_specialize=[s for s in sizes if s in names])

    return wrap


_noted: dict[Any, Any] | None = None


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    if _noted is None:
        kernel[grid](*args, **options)
        return
    kinds = tuple(
        (a.dtype,) if isinstance(a, Tensor)
        else tuple(a.block_shape) if isinstance(a, TensorDescriptor)
        else None
        for a in args
    )  # fmt: skip
    _noted.setdefault((kernel, kinds, *options.items()), (kernel, grid, args, options))


@contextlib.contextmanager
def compiling(threads: int = 8) -> Iterator[None]:
    """Inside, kernels are noted instead of run (results are garbage, so restore the state);
    on leaving, they are compiled side by side, which one after another takes many seconds."""
    global _noted
    _noted = {}
    try:
        yield
    finally:
        noted, _noted = _noted, None
    device = torch.cuda.current_device()

    def compile_one(job: Any) -> None:
        kernel, grid, args, options = job
        with torch.cuda.device(device):
            torch.zeros((), device="cuda")  # makes the CUDA context current in this thread
            kernel[grid](*args, **options)

    jobs = list(noted.values())
    if jobs:
        compile_one(jobs[0])  # alone: builds what Triton needs once per process
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(compile_one, jobs[1:]))
    torch.cuda.synchronize()


@triton.jit
def _phase(at, STRIDE: tl.constexpr):
    """Which of a stride's places ``at`` is, and how many strides before; ``at`` may be negative."""
    shifted = at + 1024 * STRIDE
    return shifted % STRIDE, shifted // STRIDE - 1024


@jit(_CONV_SIZES)
def _conv_kernel(
    x, w, y, bias, part, B, C, O, k_blocks, KH, KW, off_h, off_w, dil_h, dil_w,
    tiles_h, tiles_w, tiles_n, tiles_b,
    BT: tl.constexpr, HT: tl.constexpr, WT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STRIDE: tl.constexpr, FORWARD: tl.constexpr, HAS_BIAS: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """One output tile: BT×HT×WT positions by BN channels, an implicit GEMM over taps×channels.

    The tensor copy engine loads the shifted 5-dimensional input box and zero-fills what lies
    outside the image, so padding, ragged batches and odd sizes need no masks. The product is
    computed transposed (weights as the first operand): Triton keeps a reshaped first operand
    in registers, but a reshaped second operand in shared memory, where the tensor cores read it.
    With MOMENTS, also the mean and the sum of squared deviations of each channel over the tile,
    for a BatchNorm that may follow.

    With a STRIDE the larger images are seen as STRIDE×STRIDE smaller ones (`_phases`). Forward
    each tap reads one of them. The gradient of each of them takes every STRIDE-th tap.
    """
    BM: tl.constexpr = BT * HT * WT
    pid = tl.program_id(0)
    j = pid % tiles_n
    pid = pid // tiles_n
    tw = pid % tiles_w
    pid = pid // tiles_w
    th = pid % tiles_h
    pid = pid // tiles_h
    tb = pid % tiles_b
    model = pid // tiles_b
    o = j * BN + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    h0 = th * HT + off_h
    w0 = tw * WT + off_w
    phase = tl.program_id(1)
    first_h, before_h = _phase(phase // STRIDE + off_h, STRIDE)
    first_w, before_w = _phase(phase % STRIDE + off_w, STRIDE)
    taps_w = KW
    taps = KH * KW
    if STRIDE > 1 and not FORWARD:
        taps_w = (KW - first_w + STRIDE - 1) // STRIDE
        taps = (KH - first_h + STRIDE - 1) // STRIDE * taps_w
    for k in range(taps * k_blocks):
        tap = k // k_blocks
        c0 = (k % k_blocks) * BK
        dh = (tap // taps_w) * dil_h
        dw = (tap % taps_w) * dil_w
        if FORWARD:
            a = w.load([model * O + j * BN, tap * C + c0])
            if STRIDE == 1:
                b = x.load([model, tb * BT, h0 + dh, w0 + dw, c0]).reshape(BM, BK).T
            else:
                ph, sh = _phase(off_h + dh, STRIDE)
                pw, sw = _phase(off_w + dw, STRIDE)
                at = [model * B + tb * BT, th * HT + sh, ph, tw * WT + sw, pw * C + c0]
                b = x.load(at).reshape(BM, BK).T
        else:
            if STRIDE == 1:
                a = w.load([model * O + c0, tap * C + j * BN]).T
                b = x.load([model, tb * BT, h0 - dh, w0 - dw, c0]).reshape(BM, BK).T
            else:
                tap_h = first_h + tap // taps_w * STRIDE
                tap_w = first_w + tap % taps_w * STRIDE
                a = w.load([model * O + c0, (tap_h * KW + tap_w) * C + j * BN]).T
                at = [model, tb * BT, th * HT + before_h - dh, tw * WT + before_w - dw, c0]
                b = x.load(at).reshape(BM, BK).T
        acc = tl.dot(a, b, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + model * O + o, mask=o < O, other=0.0).to(tl.float32)[:, None]
    if MOMENTS:
        mean = tl.sum(acc, 1) / BM
        d = acc - mean[:, None]
        at = part + (((model * tiles_b + tb) * tiles_h + th) * tiles_w + tw) * 2 * O + o
        tl.store(at, mean, mask=o < O)
        tl.store(at + O, tl.sum(d * d, 1), mask=o < O)
    if STRIDE == 1 or FORWARD:
        out = acc.to(y.dtype).T.reshape(1, BT, HT, WT, BN)
        y.store([model, tb * BT, th * HT, tw * WT, j * BN], out)
    else:
        out = acc.to(y.dtype).T.reshape(BT, HT, 1, WT, BN)
        at = [model * B + tb * BT, th * HT, phase // STRIDE, tw * WT, phase % STRIDE * C + j * BN]
        y.store(at, out)


@jit(_WEIGHT_SIZES)
def _conv_weight_kernel(
    x, dy, out, B, C, O, positions, KW, off_h, off_w, dil_h, dil_w,
    tiles_h, tiles_w, tiles_b, tiles_o, tiles_c, taps, per_split,
    BT: tl.constexpr, HT: tl.constexpr, WT: tl.constexpr, BO: tl.constexpr, BC: tl.constexpr,
    STRIDE: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """One tile of one tap's weight gradient, over one share (split) of the positions."""
    BK: tl.constexpr = BT * HT * WT
    pid = tl.program_id(0)
    models = tl.num_programs(0) // (taps * tiles_o * tiles_c)
    tap = pid % taps
    pid = pid // taps
    to = pid % tiles_o
    pid = pid // tiles_o
    tc = pid % tiles_c
    model = pid // tiles_c
    split = tl.program_id(1)
    dh = (tap // KW) * dil_h + off_h
    dw = (tap % KW) * dil_w + off_w
    acc = tl.zeros((BO, BC), tl.float32)
    last = tl.minimum((split + 1) * per_split, tiles_b * tiles_h * tiles_w)
    for t in range(split * per_split, last):
        tw = t % tiles_w
        th = (t // tiles_w) % tiles_h
        tb = t // (tiles_w * tiles_h)
        if FLAT:  # the tile's positions are consecutive rows: no reshape of the first operand
            a = dy.load([model * B * positions + t * BK, to * BO]).T
        else:
            a = dy.load([model, tb * BT, th * HT, tw * WT, to * BO]).reshape(BK, BO).T
        if STRIDE == 1:
            b = x.load([model, tb * BT, th * HT + dh, tw * WT + dw, tc * BC]).reshape(BK, BC)
        else:
            ph, sh = _phase(dh, STRIDE)
            pw, sw = _phase(dw, STRIDE)
            at = [model * B + tb * BT, th * HT + sh, ph, tw * WT + sw, pw * C + tc * BC]
            b = x.load(at).reshape(BK, BC)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    o = to * BO + tl.arange(0, BO)
    c = tc * BC + tl.arange(0, BC)
    base = out + (split * models + model).to(tl.int64) * O * taps * C
    offsets = (o[:, None] * taps + tap) * C + c[None, :]
    mask = (o < O)[:, None] & (c < C)[None, :]
    tl.store(base + offsets, acc.to(out.dtype.element_ty), mask=mask)


def pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def block_of(c: int, most: int, beyond: int) -> int:
    """Channels in a block: many, but not so many that ``beyond`` of them lie beyond the last."""
    while most > 16 and -c % most > beyond:
        most //= 2
    return most


def _box(height: int, width: int, size: int) -> tuple[int, int, int]:
    """(images, rows, columns) of a tile of ``size`` positions, as few images as possible."""
    columns = min(pow2(width), size)
    rows = min(pow2(height), size // columns)
    return size // (columns * rows), rows, columns


def _descriptor(t: Tensor, block: tuple[int, ...]) -> Any:
    if t.data_ptr() % 16:  # an input that is a view at an odd place; outputs are always aligned
        t = t.clone()
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))


def _phases(t: Tensor, stride: int) -> Tensor:
    """(n, B, H, W, C) seen as (n·B, H/s, s, W/s, s·C): the images of every s-th place."""
    n, batch, height, width, c = t.shape
    return t.view(n * batch, height // stride, stride, width // stride, stride * c)


class Moments(NamedTuple):
    """Means and sums of squared deviations, (n, chunks, 2, C), of chunks of ``rows`` rows."""

    part: Tensor
    rows: int
    whole: int
    """The first so many rows, and every multiple, are what some of the first chunks are about."""


CHANNELS = 64
"""That one step of a convolution's sum takes."""


def conv_tile(channels: int, forward: bool, large: bool = False) -> tuple[int, int, int, int]:
    """(positions, channels, warps, stages) of an output tile: the fastest measured on an H200.
    ``large``: several taps, and no stride."""
    if channels <= 64:
        return (512, 64, 8, 3) if large else (256, 64, 4, 4)
    if forward:
        return 128, 128, 4, 3
    return (128, 128, 4, 4) if large and channels >= 512 else (256, 128, 8, 3)


def _output_size(size: Sequence[int], kernel: Sequence[int], geometry: Geometry) -> Pair:
    height, width = (
        (s + 2 * p - d * (k - 1) - 1) // t + 1
        for s, k, t, p, d in zip(size, kernel, *geometry, strict=True)
    )
    return height, width


def strides(x: Sequence[int], w: Sequence[int], geometry: Geometry) -> bool:
    """Whether a convolution with a stride of (n, B, H, W, C) by (n, O, kh, kw, C) has kernels: a
    tile must not reach into the next image or the next of a stride's places."""
    (s, same), _, dilation = geometry
    _, batch, height, width, c = x
    if s != same or dilation != (1, 1) or height % s or width % s or c % CHANNELS or w[1] % 8:
        return False
    out = _output_size((height, width), w[2:4], geometry)
    boxes = [
        _box(*out, conv_tile(w[1], True)[0]),
        _box(height // s, width // s, conv_tile(c, False)[0]),
        _box(*out, weight_tile(w[1], c)[2]),
    ]
    return all(batch % images == 0 for images, _, _ in boxes)


def conv_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, geometry: Geometry
) -> tuple[Tensor, Moments | None]:
    y = x.new_empty(*x.shape[:2], *_output_size(x.shape[2:4], w.shape[2:4], geometry), w.shape[1])
    (stride, _), padding, dilation = geometry
    return _conv(x, w, bias, y, (-padding[0], -padding[1]), dilation, stride, True)


def conv_input_grad(dy: Tensor, w: Tensor, size: Pair, geometry: Geometry) -> Tensor:
    dx = dy.new_empty(*dy.shape[:2], *size, w.shape[4])
    if w.shape[1] % CHANNELS:  # or a block would end in the next model's weights, see `flat` below
        w = pad(w, (0, 0, 0, 0, 0, 0, 0, -w.shape[1] % CHANNELS))
    (stride, _), padding, dilation = geometry
    return _conv(dy, w, None, dx, padding, dilation, stride, False)[0]


def _conv(
    x: Tensor, w: Tensor, bias: Tensor | None, y: Tensor, offset: Pair, dilation: Pair,
    stride: int, forward: bool,
) -> tuple[Tensor, Moments | None]:  # fmt: skip
    n, batch, out_h, out_w, out_c = y.shape
    _, o, kh, kw, c = w.shape
    bm, bn, warps, stages = conv_tile(out_c, forward, large=stride == 1 < kh * kw)
    image, result, phases = x, y, 1
    if stride > 1 and forward:
        image = _phases(x, stride)
    elif stride > 1:
        result, phases = _phases(y, stride), stride * stride
        out_h, out_w = out_h // stride, out_w // stride
        bn = bn if c % bn == 0 else 64
    bt, ht, wt = _box(out_h, out_w, bm)
    bk = CHANNELS
    in_box = (bt, ht, 1, wt, bk) if image is not x else (1, bt, ht, wt, bk)
    out_box = (bt, ht, 1, wt, bn) if result is not y else (1, bt, ht, wt, bn)
    k_blocks = triton.cdiv(c if forward else o, bk)
    tiles_b, tiles_h, tiles_w = (
        triton.cdiv(batch, bt), triton.cdiv(out_h, ht), triton.cdiv(out_w, wt)
    )  # fmt: skip
    tiles_n = triton.cdiv(out_c, bn)
    flat = w.view(n * o, kh * kw * c)
    moments = None
    if forward and batch % bt == 0 and out_h % ht == 0 and out_w % wt == 0:
        tiles = tiles_b * tiles_h * tiles_w
        moments = Moments(x.new_empty(n, tiles, 2, o, dtype=torch.float32), bm, bm)
    launch(_conv_kernel, (n * tiles_b * tiles_h * tiles_w * tiles_n, phases),
        _descriptor(image, in_box),
        _descriptor(flat, (bn, bk) if forward else (bk, bn)),
        _descriptor(result, out_box),
        bias if bias is not None else flat, flat if moments is None else moments.part,
        batch, c, o, k_blocks, kh, kw, *offset, *dilation, tiles_h, tiles_w, tiles_n, tiles_b,
        BT=bt, HT=ht, WT=wt, BN=bn, BK=bk, STRIDE=stride, FORWARD=forward,
        HAS_BIAS=bias is not None, MOMENTS=moments is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y, moments


def weight_tile(o: int, c: int) -> tuple[int, int, int, int, int]:
    """(output channels, input channels, positions, warps, stages) of a weight-gradient tile."""
    if c <= 64:
        return (64, 64, 128, 4, 3) if c > 32 and o <= 64 else (128, 64, 64, 4, 4)
    if c <= 128:
        return (128, 128, 128, 4, 3) if o <= 128 else (128, 128, 64, 4, 3)
    return (128, 128, 128, 8, 3) if o <= 256 else (128, 256, 64, 8, 3)


def conv_weight_grad(x: Tensor, dy: Tensor, kernel: Pair, geometry: Geometry) -> Tensor:
    n, batch, out_h, out_w, o = dy.shape
    c = x.shape[4]
    kh, kw = kernel
    (stride, _), padding, dilation = geometry
    bo, bc, bk, warps, stages = weight_tile(o, c)
    bo, bc = min(bo, max(64, pow2(o))), min(bc, max(16, pow2(c)))
    bt, ht, wt = _box(out_h, out_w, bk)
    image, box = x, (1, bt, ht, wt, bc)
    if stride > 1:
        bc = bc if c % bc == 0 else 64
        image, box = _phases(x, stride), (bt, ht, 1, wt, bc)
    tiles_b, tiles_h, tiles_w = (
        triton.cdiv(batch, bt), triton.cdiv(out_h, ht), triton.cdiv(out_w, wt)
    )  # fmt: skip
    tiles_o, tiles_c, taps = triton.cdiv(o, bo), triton.cdiv(c, bc), kh * kw
    steps = tiles_b * tiles_h * tiles_w
    blocks = n * taps * tiles_o * tiles_c
    # One wave: five small tiles, or one large one, on each of 132 multiprocessors.
    wanted = triton.cdiv(660, blocks) if bc <= 64 else 132 // blocks
    splits = max(1, min(wanted, steps // 16))
    per_split = triton.cdiv(steps, splits)
    splits = triton.cdiv(steps, per_split)
    # Where the last tile is not full, rows in a row go on into the next model's. There they meet
    # zeros, which make nothing of any number, but not of what is none.
    flat = wt == out_w and out_h % ht == 0 and batch % bt == 0
    out = x.new_empty(
        splits, n, o, kh, kw, c, dtype=torch.float32 if splits > 1 else x.dtype
    )  # fmt: skip
    launch(_conv_weight_kernel, (blocks, splits),
        _descriptor(image, box),
        _descriptor(dy.view(-1, o), (bk, bo)) if flat else _descriptor(dy, (1, bt, ht, wt, bo)),
        out, batch, c, o, out_h * out_w, kw, -padding[0], -padding[1], *dilation,
        tiles_h, tiles_w, tiles_b, tiles_o, tiles_c, taps, per_split,
        BT=bt, HT=ht, WT=wt, BO=bo, BC=bc, STRIDE=stride, FLAT=flat, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(0).to(x.dtype)


# ------------------------------------------------- convolution of few channels (first layers)


@triton.jit
def _gather_patches(x, rows, last, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
                    OHW: tl.constexpr, OW: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
                    CP: tl.constexpr, KWP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
                    KP: tl.constexpr):  # fmt: skip
    """Patches (rows × KP) of a model's images. A patch is KH rows of KWP columns of CP channels,
    both rounded up to powers of two, so that without dilation its values are loaded by fours."""
    k = tl.arange(0, KP)
    i = k // (KWP * CP)
    j = (k // CP) % KWP
    position = rows % OHW
    h = (position // OW * stride_h - pad_h)[:, None] + (i * dil_h)[None, :]
    w = (position % OW * stride_w - pad_w)[:, None] + (j * dil_w)[None, :]
    inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (rows < last)[:, None]
    inside = inside & ((i < KH) & (j < KW))[None, :]
    corner = (rows // OHW * H + position // OW * stride_h - pad_h) * W
    corner = (corner + position % OW * stride_w - pad_w) * CP
    if KWP * CP >= 4 and KW > 1:
        shift = (i * dil_h * W + j * (dil_w - 1)) * CP + k % (KWP * CP)
    else:
        shift = (i * dil_h * W + j * dil_w) * CP + k % CP
    return tl.load(x + corner[:, None] + shift[None, :], mask=inside, other=0.0)


@triton.jit
def _small_forward_kernel(
    x, w, y, bias, part, rows_total, tiles, per_program, O,
    stride_h, stride_w, pad_h, pad_w, dil_h, dil_w, image_size,
    OHW: tl.constexpr, OW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, KWP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, HAS_BIAS: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    model = tl.program_id(1)
    o = tl.program_id(2) * BN + tl.arange(0, BN)
    k = tl.arange(0, KP)
    i, j, c = k // (KWP * CP), (k // CP) % KWP, k % CP
    used = (i < KH) & (j < KW) & (c < C)
    weights = tl.load(
        w + (model * O + o)[:, None] * (KH * KW * C) + ((i * KW + j) * C + c)[None, :],
        mask=used[None, :] & (o < O)[:, None], other=0.0,
    )  # fmt: skip
    if HAS_BIAS:
        shift = tl.load(bias + model * O + o, mask=o < O, other=0.0).to(tl.float32)
    x += model.to(tl.int64) * image_size
    y += model.to(tl.int64) * rows_total * O
    part += model * tiles * 2 * O
    first = tl.program_id(0) * per_program
    for tile in range(first, tl.minimum(first + per_program, tiles)):
        rows = tile * BM + tl.arange(0, BM)
        a = _gather_patches(x, rows, rows_total, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
                            OHW, OW, H, W, CP, KWP, KH, KW, KP)  # fmt: skip
        acc = tl.dot(weights, a.T, input_precision="ieee")  # sums over rows stay in threads
        if HAS_BIAS:
            acc += shift[:, None]
        if MOMENTS:
            mean = tl.sum(acc, 1) / BM
            d = acc - mean[:, None]
            tl.store(part + tile * 2 * O + o, mean, mask=o < O)
            tl.store(part + (tile * 2 + 1) * O + o, tl.sum(d * d, 1), mask=o < O)
        mask = (rows < rows_total)[:, None] & (o < O)[None, :]
        out = acc.to(y.dtype.element_ty).T
        tl.store(y + rows[:, None] * O + o[None, :], out, mask=mask)


@triton.jit
def _small_weight_kernel(
    x, dy, out, rows_total, per_split, O, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
    image_size,
    OHW: tl.constexpr, OW: tl.constexpr, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr,
    CP: tl.constexpr, KWP: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, KP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    model = tl.program_id(1)
    o = tl.program_id(2) * BN + tl.arange(0, BN)
    last = tl.minimum((split + 1) * per_split, rows_total)
    x += model.to(tl.int64) * image_size
    dy += model.to(tl.int64) * rows_total * O
    acc = tl.zeros((BN, KP), tl.float32)
    for start in range(split * per_split, last, BM):
        rows = start + tl.arange(0, BM)
        a = _gather_patches(x, rows, last, stride_h, stride_w, pad_h, pad_w, dil_h, dil_w,
                            OHW, OW, H, W, CP, KWP, KH, KW, KP)  # fmt: skip
        g = tl.load(dy + rows[:, None] * O + o[None, :],
                    mask=(rows < last)[:, None] & (o < O)[None, :], other=0.0)  # fmt: skip
        acc = tl.dot(g.T, a, acc, input_precision="ieee")
    k = tl.arange(0, KP)
    i, j, c = k // (KWP * CP), (k // CP) % KWP, k % CP
    base = out + ((split * tl.num_programs(1) + model) * O).to(tl.int64) * (KH * KW * C)
    mask = (o < O)[:, None] & ((i < KH) & (j < KW) & (c < C))[None, :]
    offsets = o[:, None] * (KH * KW * C) + ((i * KW + j) * C + c)[None, :]
    tl.store(base + offsets, acc, mask=mask)


def patch_size(kh: int, kw: int, c: int) -> int:
    """Values of a gathered patch, padding included."""
    return max(16, pow2(kh * pow2(kw) * pow2(c)))


def _small_geometry(x: Tensor, out_h: int, out_w: int, kh: int, kw: int, c: int) -> dict[str, int]:
    return {
        "OHW": out_h * out_w, "OW": out_w, "H": x.shape[2], "W": x.shape[3], "C": c,
        "CP": x.shape[4], "KWP": pow2(kw), "KH": kh, "KW": kw, "KP": patch_size(kh, kw, c),
    }  # fmt: skip


def small_forward(
    x: Tensor, w: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: Pair,
    dilation: Pair,
) -> tuple[Tensor, Moments | None]:  # fmt: skip
    """x's channels are padded to a power of two."""
    n, batch = x.shape[:2]
    _, o, kh, kw, c = w.shape
    out_h, out_w = _output_size(x.shape[2:4], (kh, kw), (stride, padding, dilation))
    y = x.new_empty(n, batch, out_h, out_w, o)
    rows = batch * out_h * out_w
    bm, warps, stages, programs = 128, 4, 2, 1056
    tiles = triton.cdiv(rows, bm)
    per_program = triton.cdiv(tiles * n, programs)
    moments = None
    if rows % bm == 0:
        moments = Moments(x.new_empty(n, tiles, 2, o, dtype=torch.float32), bm, bm)
    launch(
        _small_forward_kernel, (triton.cdiv(tiles, per_program), n, triton.cdiv(o, 64)), x, w, y,
        bias if bias is not None else w, w if moments is None else moments.part,
        rows, tiles, per_program, o, *stride, *padding, *dilation, x[0].numel(),
        **_small_geometry(x, out_h, out_w, kh, kw, c),
        BM=bm, BN=64, HAS_BIAS=bias is not None, MOMENTS=moments is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y, moments


def small_weight_grad(
    x: Tensor, dy: Tensor, shape: tuple[int, int, int], stride: tuple[int, int],
    padding: tuple[int, int], dilation: tuple[int, int],
) -> Tensor:  # fmt: skip
    n, batch, out_h, out_w, o = dy.shape
    kh, kw, c = shape
    bm, warps, stages = 128, 4, 3
    rows, bn = batch * out_h * out_w, 64
    splits = max(1, min(triton.cdiv(1056, n), rows // (4 * bm)))
    per_split = triton.cdiv(triton.cdiv(rows, splits), bm) * bm
    splits = triton.cdiv(rows, per_split)
    out = x.new_empty(splits, n, o, kh, kw, c, dtype=torch.float32)
    launch(
        _small_weight_kernel, (splits, n, triton.cdiv(o, bn)), x, dy, out, rows, per_split, o,
        *stride, *padding, *dilation, x[0].numel(), **_small_geometry(x, out_h, out_w, kh, kw, c),
        BM=bm, BN=bn, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out.sum(0).to(x.dtype)


# ------------------------------------------------------------- batch normalization + ReLU + pool
# A model's rows are (sample, row, column); the first `first` samples are one population with
# their own statistics, the rest another. Programs take a chunk of rows of one population.


@triton.jit
def _chunk(first_rows, rows, chunks0, per_chunk):
    """(population, first row, end) of this program's chunk of rows."""
    i = tl.program_id(0)
    second = i >= chunks0
    start = tl.where(second, first_rows + (i - chunks0) * per_chunk, i * per_chunk)
    end = tl.minimum(start + per_chunk, tl.where(second, rows, first_rows))
    return second.to(tl.int32), start, end


@jit(_ROW_SIZES)
def _stats_kernel(x, part, first_rows, rows, chunks0, per_chunk, C,
                  BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Mean and sum of squared deviations of each chunk, each channel."""
    _, start, end = _chunk(first_rows, rows, chunks0, per_chunk)
    model = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    x += model.to(tl.int64) * rows * C
    shift = tl.load(x + start * C + c, mask=c < C, other=0.0).to(tl.float32)  # keeps squares small
    total = tl.zeros((BR, BC), tl.float32)
    square = tl.zeros((BR, BC), tl.float32)
    for r0 in range(start, end, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < end)[:, None] & (c < C)[None, :]
        v = tl.load(x + r[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
        d = tl.where(mask, v - shift[None, :], 0.0)
        total += d
        square += d * d
    count = (end - start).to(tl.float32)
    mean = tl.sum(total, 0) / count
    m2 = tl.sum(square, 0) - count * mean * mean
    out = part + (model * tl.num_programs(0) + tl.program_id(0)) * 2 * C + c
    tl.store(out, shift + mean, mask=c < C)
    tl.store(out + C, m2, mask=c < C)


@jit(_ROW_SIZES)
def _stats_finish_kernel(
    part, mean_out, inv_out, running_mean, running_var, second_mean, second_var, momentum, eps,
    first_rows, rows, chunks0, chunks, per_chunk, C,
    BC: tl.constexpr, CH: tl.constexpr, RUNNING: tl.constexpr,
):  # fmt: skip
    """Joins the chunks' moments (Chan's formula) and moves the running statistics."""
    model = tl.program_id(0)
    population = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    lo = tl.where(population == 0, 0, chunks0)
    hi = tl.where(population == 0, chunks0, chunks)
    size = tl.where(population == 0, first_rows, rows - first_rows)
    total = size.to(tl.float32)
    base = part + model * chunks * 2 * C + c
    shift = tl.load(base + lo * 2 * C, mask=c < C, other=0.0)  # keeps the squares small
    sum_d = tl.zeros((CH, BC), tl.float32)
    sum_m2 = tl.zeros((CH, BC), tl.float32)
    for i0 in range(lo, hi, CH):
        i = i0 + tl.arange(0, CH)
        count = tl.minimum(per_chunk, size - (i - lo) * per_chunk).to(tl.float32)[:, None]
        mask = (i < hi)[:, None] & (c < C)[None, :]
        at = base[None, :] + i[:, None] * 2 * C
        d = tl.load(at, mask=mask, other=0.0) - shift[None, :]
        m2 = tl.load(at + C, mask=mask, other=0.0)
        sum_d += tl.where(mask, d * count, 0.0)
        sum_m2 += tl.where(mask, m2 + d * d * count, 0.0)
    d = tl.sum(sum_d, 0) / total
    mean = shift + d
    m2 = tl.maximum(tl.sum(sum_m2, 0) - total * d * d, 0.0)
    out = (model * tl.num_programs(1) + population) * C + c
    tl.store(mean_out + out, mean, mask=c < C)
    tl.store(inv_out + out, tl.rsqrt(m2 / total + eps), mask=c < C)
    if RUNNING:
        unbiased = m2 / tl.maximum(total - 1.0, 1.0)
        at = model * C + c
        if population == 0:
            _move(running_mean + at, mean, momentum, c < C)
            _move(running_var + at, unbiased, momentum, c < C)
        else:
            _move(second_mean + at, mean, momentum, c < C)
            _move(second_var + at, unbiased, momentum, c < C)


@triton.jit
def _move(running, value, momentum, mask):
    old = tl.load(running, mask=mask)
    tl.store(running, old + momentum * (value - old), mask=mask)


@triton.jit
def _scale_shift(mean, inv, weight, bias, model, population, populations, c, C):
    at = (model * populations + population) * C + c
    mu = tl.load(mean + at, mask=c < C, other=0.0)
    rstd = tl.load(inv + at, mask=c < C, other=0.0)
    g = tl.load(weight + model * C + c, mask=c < C, other=0.0).to(tl.float32)
    b = tl.load(bias + model * C + c, mask=c < C, other=0.0).to(tl.float32)
    return mu, rstd, g * rstd, b


@triton.jit
def _rectified(z, RELU: tl.constexpr):
    """RELU: 0 nothing, 1 ReLU, 6 ReLU6."""
    if RELU:
        z = tl.maximum(z, 0.0)
    if RELU == 6:
        z = tl.minimum(z, 6.0)
    return z


@triton.jit
def _let_through(g, z, RELU: tl.constexpr):
    """The gradient in front of what gave z, before or after it."""
    if RELU:
        g = tl.where(z > 0.0, g, 0.0)
    if RELU == 6:
        g = tl.where(z < 6.0, g, 0.0)
    return g


@triton.jit
def _corner(r, W):
    """First of the four input rows of pooled row r; W is the input width, pooled is W // 2."""
    half = W // 2
    return (r // half) * (2 * W) + (r % half) * 2


@jit(_ROW_SIZES)
def _norm_kernel(
    x, added, y, winners, mean, inv, weight, bias,
    populations, first_rows, rows, chunks0, per_chunk, C, W,
    ADD: tl.constexpr, RELU: tl.constexpr, POOL: tl.constexpr, KEEP: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Normalize, then add another tensor, ReLU and a 2×2 maximum if asked; rows count the
    output's. KEEP: also store the input value that each maximum came from, all that the
    gradient's sums need."""
    population, start, end = _chunk(first_rows, rows, chunks0, per_chunk)
    model = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    mu, _rstd, scale, b = _scale_shift(
        mean, inv, weight, bias, model, population, populations, c, C
    )
    y += model.to(tl.int64) * rows * C
    x += model.to(tl.int64) * rows * C * (4 if POOL else 1)
    for r0 in range(start, end, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < end)[:, None] & (c < C)[None, :]
        if POOL:
            at = x + _corner(r, W)[:, None] * C + c[None, :]
            chosen = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            z = (chosen - mu) * scale + b
            for i in tl.static_range(1, 4):
                step = ((i // 2) * W + i % 2) * C
                v = tl.load(at + step, mask=mask, other=0.0).to(tl.float32)
                other = (v - mu) * scale + b
                chosen = tl.where(other > z, v, chosen)
                z = tl.where(other > z, other, z)
            if KEEP:
                to = winners + model.to(tl.int64) * rows * C + r[:, None] * C + c[None, :]
                tl.store(to, chosen.to(winners.dtype.element_ty), mask=mask)
        else:
            v = tl.load(x + r[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)
            z = (v - mu) * scale + b
        if ADD:
            other = added + model.to(tl.int64) * rows * C + r[:, None] * C + c[None, :]
            z += tl.load(other, mask=mask, other=0.0).to(tl.float32)
        z = _rectified(z, RELU)
        tl.store(y + r[:, None] * C + c[None, :], z.to(y.dtype.element_ty), mask=mask)


@jit(_ROW_SIZES)
def _norm_sums_kernel(
    x, dy, second, y, passed, part, mean, inv, weight, bias,
    populations, first_rows, rows, chunks0, per_chunk, C, DC,
    TWO: tl.constexpr, ADD: tl.constexpr, RELU: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Chunk sums of g and g·x̂, g being the gradient at the normalized values. After pooling, x
    holds the values that the maxima came from: the others have no gradient. ADD: something was
    added before the ReLU; what that let through shows in y. TWO: the gradient comes in two parts.
    Then g is stored, which the next kernel would have to find again. DC: from a row of dy to the
    next, which may be part of a longer one."""
    population, start, end = _chunk(first_rows, rows, chunks0, per_chunk)
    model = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    mu, rstd, scale, b = _scale_shift(mean, inv, weight, bias, model, population, populations, c, C)
    x += model.to(tl.int64) * rows * C
    dy += model.to(tl.int64) * rows * DC
    second += model.to(tl.int64) * rows * C
    y += model.to(tl.int64) * rows * C
    passed += model.to(tl.int64) * rows * C
    sum_g = tl.zeros((BR, BC), tl.float32)
    sum_gv = tl.zeros((BR, BC), tl.float32)
    for r0 in range(start, end, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < end)[:, None] & (c < C)[None, :]
        at = r[:, None] * C + c[None, :]
        g = tl.load(dy + r[:, None] * DC + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if TWO:
            g += tl.load(second + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mu
        if ADD:
            g = _let_through(g, tl.load(y + at, mask=mask, other=0.0).to(tl.float32), RELU)
        else:
            g = _let_through(g, v * scale + b, RELU)
        if ADD or TWO:
            tl.store(passed + at, g.to(passed.dtype.element_ty), mask=mask)
        sum_g += g
        sum_gv += g * v
    out = part + (model * tl.num_programs(0) + tl.program_id(0)) * 2 * C + c
    tl.store(out, tl.sum(sum_g, 0), mask=c < C)
    tl.store(out + C, tl.sum(sum_gv, 0) * rstd, mask=c < C)


@jit(_ROW_SIZES)
def _norm_grad_kernel(
    x, dy, dx, coefficients, mean, inv, weight, bias,
    populations, first_rows, rows, chunks0, per_chunk, C, DC, W,
    RELU: tl.constexpr, POOL: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """The input gradient; which value of a window is its first maximum is found again."""
    population, start, end = _chunk(first_rows, rows, chunks0, per_chunk)
    model = tl.program_id(1)
    c = tl.program_id(2) * BC + tl.arange(0, BC)
    mu, rstd, scale, b = _scale_shift(mean, inv, weight, bias, model, population, populations, c, C)
    taps: tl.constexpr = 4 if POOL else 1
    dy += model.to(tl.int64) * rows * DC
    x += model.to(tl.int64) * rows * C * taps
    dx += model.to(tl.int64) * rows * C * taps
    means = coefficients + (model * populations + population) * 2 * C + c
    mean_g = tl.load(means, mask=c < C, other=0.0)
    slope = tl.load(means + C, mask=c < C, other=0.0) * rstd
    for r0 in range(start, end, BR):
        r = r0 + tl.arange(0, BR)
        mask = (r < end)[:, None] & (c < C)[None, :]
        g = tl.load(dy + r[:, None] * DC + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if POOL:
            at = _corner(r, W)[:, None] * C + c[None, :]
            v0 = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mu
            v1 = tl.load(x + at + C, mask=mask, other=0.0).to(tl.float32) - mu
            v2 = tl.load(x + at + W * C, mask=mask, other=0.0).to(tl.float32) - mu
            v3 = tl.load(x + at + (W + 1) * C, mask=mask, other=0.0).to(tl.float32) - mu
            best = v0 * scale + b
            winner = tl.zeros((BR, BC), tl.int32)
            for i in tl.static_range(1, 4):
                z = (v1 if i == 1 else (v2 if i == 2 else v3)) * scale + b
                winner = tl.where(z > best, i, winner)
                best = tl.where(z > best, z, best)
            g = _let_through(g, best, RELU)
            for i in tl.static_range(4):
                v = v0 if i == 0 else (v1 if i == 1 else (v2 if i == 2 else v3))
                d = scale * (tl.where(winner == i, g, 0.0) - mean_g - v * slope)
                to = dx + at + ((i // 2) * W + i % 2) * C
                tl.store(to, d.to(dx.dtype.element_ty), mask=mask)
        else:
            at = r[:, None] * C + c[None, :]
            v = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - mu
            g = _let_through(g, v * scale + b, RELU)
            d = scale * (g - mean_g - v * slope)
            tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)


@jit(_ROW_SIZES)
def _norm_grad_finish_kernel(
    part, coefficients, dweight, dbias, populations, first_count, count, chunks0, chunks, C,
    BC: tl.constexpr, CH: tl.constexpr,
):  # fmt: skip
    """Adds the chunks' sums: parameter gradients, and the means the input gradient needs."""
    model = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    base = part + model * chunks * 2 * C + c[None, :]
    total_g = tl.zeros((BC,), tl.float32)
    total_gx = tl.zeros((BC,), tl.float32)
    for population in range(populations):
        lo = tl.where(population == 0, 0, chunks0)
        hi = tl.where(population == 0, chunks0, chunks)
        size = tl.where(population == 0, first_count, count - first_count).to(tl.float32)
        acc_g = tl.zeros((CH, BC), tl.float32)
        acc_gx = tl.zeros((CH, BC), tl.float32)
        for i0 in range(lo, hi, CH):
            i = i0 + tl.arange(0, CH)
            mask = (i < hi)[:, None] & (c < C)[None, :]
            acc_g += tl.load(base + i[:, None] * 2 * C, mask=mask, other=0.0)
            acc_gx += tl.load(base + i[:, None] * 2 * C + C, mask=mask, other=0.0)
        g = tl.sum(acc_g, 0)
        gx = tl.sum(acc_gx, 0)
        out = coefficients + (model * populations + population) * 2 * C + c
        tl.store(out, g / size, mask=c < C)
        tl.store(out + C, gx / size, mask=c < C)
        total_g += g
        total_gx += gx
    tl.store(dweight + model * C + c, total_gx, mask=c < C)
    tl.store(dbias + model * C + c, total_g, mask=c < C)


class _Rows:
    """How a (n, B, H, W, C) tensor's rows are cut into chunks and channel blocks."""

    def __init__(
        self, shape: tuple[int, ...], first: int, tile: int = 4096, programs: int = 2112
    ) -> None:
        n, batch, height, width, self.c = shape
        self.n, self.rows, self.first = n, batch * height * width, first * height * width
        self.bc = block_of(self.c, 128, self.c // 3)
        self.br = max(8, tile // self.bc)
        blocks = n * triton.cdiv(self.c, self.bc)
        wanted = triton.cdiv(self.rows * blocks, programs)
        self.per_chunk = triton.cdiv(max(wanted, 1), self.br) * self.br
        self.chunks0 = triton.cdiv(self.first, self.per_chunk)
        self.chunks = self.chunks0 + triton.cdiv(self.rows - self.first, self.per_chunk)
        self.populations = 1 if self.first == self.rows else 2
        self.grid = (self.chunks, n, triton.cdiv(self.c, self.bc))


def norm_stats(
    x: Tensor, moments: Moments | None, first: int, running: Sequence[tuple[Tensor, Tensor]],
    momentum: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(mean, 1/standard deviation), each (n, populations, C).

    Moves the running means and variances, float32 and dense, of each population, if given.
    """
    r = _Rows(tuple(x.shape), first)
    if moments is None or r.first % moments.whole:
        part = x.new_empty(r.n, r.chunks, 2, r.c, dtype=torch.float32)
        moments = Moments(part, r.per_chunk, r.per_chunk)
        launch(_stats_kernel, r.grid, x, moments.part, r.first, r.rows, r.chunks0, r.per_chunk,
                r.c, BR=r.br, BC=r.bc)  # fmt: skip
    mean = x.new_empty(r.n, r.populations, r.c, dtype=torch.float32)
    inv = torch.empty_like(mean)
    places = [tensor for pair in running for tensor in pair] or [mean, inv]
    launch(
        _stats_finish_kernel, (r.n, r.populations, triton.cdiv(r.c, 16)), moments.part, mean, inv,
        *places[:2], *places[-2:], momentum, eps,
        r.first, r.rows, triton.cdiv(r.first, moments.rows), moments.part.shape[1], moments.rows,
        r.c, BC=16, CH=128, RUNNING=bool(running),
    )  # fmt: skip
    return mean, inv


class After(NamedTuple):
    """What follows a normalisation in the same kernel."""

    relu: int = 0
    """0: nothing; 1: ReLU; 6: ReLU6."""
    pool: bool = False
    """A 2×2 maximum; not together with something added."""


def norm_apply(
    x: Tensor, mean: Tensor, inv: Tensor, weight: Tensor, bias: Tensor, first: int, after: After,
    added: Tensor | None = None, keep: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The output and, after pooling if asked, the input values that the maxima came from."""
    n, batch, height, width, c = x.shape
    pool = after.pool
    y = x.new_empty(n, batch, height // 2, width // 2, c) if pool else torch.empty_like(x)
    winners = torch.empty_like(y) if pool and keep else None
    r = _Rows(tuple(y.shape), first, 2048 if pool else 4096)
    launch(
        _norm_kernel, r.grid, x, x if added is None else added, y,
        y if winners is None else winners, mean, inv, weight, bias,
        r.populations, r.first, r.rows, r.chunks0, r.per_chunk, r.c, width,
        ADD=added is not None, RELU=after.relu, POOL=pool, KEEP=winners is not None,
        BR=r.br, BC=r.bc,
    )  # fmt: skip
    return y, winners


def row_stride(t: Tensor) -> int | None:
    """From each of the rows of C values of (n, B, H, W, C) to the next; None: it varies, or what
    they are part of is too long for offsets of 32 bits."""
    _, batch, height, width, c = t.shape
    if t.is_contiguous():
        return c
    row = t.stride(3)
    even = t.stride() == (batch * height * width * row, height * width * row, width * row, row, 1)
    return row if even and t.stride(0) < 2**30 else None


def norm_backward(
    dy: Tensor, x: Tensor, winners: Tensor | None, mean: Tensor, inv: Tensor, weight: Tensor,
    bias: Tensor, first: int, after: After, output: Tensor | None = None,
    second: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of (x, weight, bias) and of what was added. ``output``: if something was added
    before a ReLU. ``second``: the other part of ``dy``, which comes from two places. Each row of
    ``dy`` may be part of a longer one (:func:`row_stride`)."""
    s = _Rows(tuple(dy.shape), first, 4096, 264 if x.shape[4] > 64 else 1056)
    part = x.new_empty(s.n, s.chunks, 2, s.c, dtype=torch.float32)
    stored = output is not None or second is not None
    passed = dy.new_empty(dy.shape) if stored else dy
    launch(
        _norm_sums_kernel, s.grid, x if winners is None else winners, dy,
        dy if second is None else second, dy if output is None else output, passed, part,
        mean, inv, weight, bias, s.populations, s.first, s.rows, s.chunks0, s.per_chunk, s.c,
        row_stride(dy), TWO=second is not None, ADD=output is not None, RELU=after.relu,
        BR=s.br, BC=s.bc, num_warps=4,
    )  # fmt: skip
    coefficients = x.new_empty(s.n, s.populations, 2, s.c, dtype=torch.float32)
    dweight = x.new_empty(s.n, s.c, dtype=torch.float32)
    dbias = torch.empty_like(dweight)
    taps = 4 if after.pool else 1
    launch(
        _norm_grad_finish_kernel, (s.n, triton.cdiv(s.c, 16)), part, coefficients, dweight, dbias,
        s.populations, s.first * taps, s.rows * taps, s.chunks0, s.chunks, s.c, BC=16, CH=128,
    )  # fmt: skip
    dx = torch.empty_like(x)
    r = _Rows(tuple(dy.shape), first, 2048 if after.pool else 4096)
    launch(
        _norm_grad_kernel, r.grid, x, passed, dx, coefficients, mean, inv, weight, bias,
        r.populations, r.first, r.rows, r.chunks0, r.per_chunk, r.c, row_stride(passed),
        x.shape[3], RELU=0 if stored else after.relu, POOL=after.pool, BR=r.br, BC=r.bc,
    )  # fmt: skip
    return dx, dweight, dbias, passed


# --------------------------------------------------------------------------------- the update


@triton.jit
def _descend_kernel(
    param, grad, rate, rounded, size, ROUND: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    g = tl.load(grad + at, mask=mask).to(tl.float32)
    p = tl.load(param + at, mask=mask)
    p -= tl.load(rate) * g
    tl.store(param + at, p, mask=mask)
    if ROUND:
        tl.store(rounded + at, p.to(rounded.dtype.element_ty), mask=mask)


def descend(param: Tensor, grad: Tensor, rate: Tensor, rounded: Tensor | None) -> None:
    """param −= rate·grad in float32, and a rounded copy of it; all lie in memory alike."""
    launch(
        _descend_kernel, (triton.cdiv(param.numel(), 4096),), param, grad, rate,
        param if rounded is None else rounded, param.numel(), ROUND=rounded is not None,
        BLOCK=4096, num_warps=8,
    )  # fmt: skip
