# mypy: disable-error-code="import-not-found, no-untyped-def, untyped-decorator, no-untyped-call"
"""Triton kernels for attention over few tokens: all of a head is on the chip at once.

So softmax is taken in one go, and the gradient computes it anew instead of reading statistics.
Tokens are seen in two parts whose sizes are powers of two, 64 and 16 for 65 of them: one part for
all would be up to four times the work.

Queries, keys and values are (samples, heads, tokens, D) with the same strides, D last in memory:
parts of one product, say. What comes out lies as (samples, tokens, heads, D).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from perfed.engines.stacked.triton_kernels import jit, launch, pow2

MOST_TOKENS, WIDEST = 128, 128
"""Beyond, PyTorch's attention is better, which takes keys block by block."""

_SIZES = ["tokens", "heads"]


@triton.jit
def _places(first, tokens, of_token, D, SIZE: tl.constexpr, BD: tl.constexpr):
    """Of SIZE tokens from the first one: where they lie, and which are there at all."""
    t = first + tl.arange(0, SIZE)
    d = tl.arange(0, BD)
    return t[:, None] * of_token + d[None, :], (t < tokens)[:, None] & (d < D)[None, :]


@triton.jit
def _loaded(start, first, tokens, of_token, D, SIZE: tl.constexpr, BD: tl.constexpr):
    at, mask = _places(first, tokens, of_token, D, SIZE, BD)
    return tl.load(start + at, mask=mask, other=0.0)


@triton.jit
def _stored(start, values, first, tokens, of_token, D, SIZE: tl.constexpr, BD: tl.constexpr):
    at, mask = _places(first, tokens, of_token, D, SIZE, BD)
    tl.store(start + at, values.to(start.dtype.element_ty), mask=mask)


@triton.jit
def _scores(q, k, first, tokens, scale):
    scores = tl.dot(q, k.T, input_precision="ieee") * scale
    there = first + tl.arange(0, k.shape[0]) < tokens
    return tl.where(there[None, :], scores, float("-inf"))


@triton.jit
def _shares(q, k0, k1, tokens, scale):
    """How much each query takes of each value, of those in either part."""
    s0 = _scores(q, k0, 0, tokens, scale)
    s1 = _scores(q, k1, k0.shape[0], tokens, scale)
    highest = tl.maximum(tl.max(s0, 1), tl.max(s1, 1))[:, None]
    e0, e1 = tl.exp(s0 - highest), tl.exp(s1 - highest)
    total = (tl.sum(e0, 1) + tl.sum(e1, 1))[:, None]
    return e0 / total, e1 / total


@triton.jit
def _seen(q, k0, k1, v0, v1, tokens, scale):
    p0, p1 = _shares(q, k0, k1, tokens, scale)
    seen = tl.dot(p0.to(v0.dtype), v0, input_precision="ieee")
    return tl.dot(p1.to(v1.dtype), v1, seen, input_precision="ieee")


@jit(_SIZES)
def _attention_kernel(
    queries, keys, values, out, tokens, heads, D, of_sample, of_head, of_token, scale,
    A: tl.constexpr, B: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One head of one sample."""
    sample = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    start = sample * of_sample + head * of_head
    q0 = _loaded(queries + start, 0, tokens, of_token, D, A, BD)
    k0 = _loaded(keys + start, 0, tokens, of_token, D, A, BD)
    k1 = _loaded(keys + start, A, tokens, of_token, D, B, BD)
    v0 = _loaded(values + start, 0, tokens, of_token, D, A, BD)
    v1 = _loaded(values + start, A, tokens, of_token, D, B, BD)
    q1 = _loaded(queries + start, A, tokens, of_token, D, B, BD)
    out += (sample * tokens * heads + head) * D
    y0 = _seen(q0, k0, k1, v0, v1, tokens, scale)
    _stored(out, y0, 0, tokens, heads * D, D, A, BD)
    y1 = _seen(q1, k0, k1, v0, v1, tokens, scale)
    _stored(out, y1, A, tokens, heads * D, D, B, BD)


@triton.jit
def _gradients(q, g, k0, k1, v0, v1, dk0, dk1, dv0, dv1, tokens, scale):
    """Of these queries, and what they add to those of all keys and values."""
    p0, p1 = _shares(q, k0, k1, tokens, scale)
    dp0 = tl.dot(g, v0.T, input_precision="ieee")
    dp1 = tl.dot(g, v1.T, input_precision="ieee")
    dv0 = tl.dot(p0.to(g.dtype).T, g, dv0, input_precision="ieee")
    dv1 = tl.dot(p1.to(g.dtype).T, g, dv1, input_precision="ieee")
    mean = (tl.sum(p0 * dp0, 1) + tl.sum(p1 * dp1, 1))[:, None]
    ds0 = (p0 * (dp0 - mean) * scale).to(q.dtype)
    ds1 = (p1 * (dp1 - mean) * scale).to(q.dtype)
    dq = tl.dot(ds0, k0, input_precision="ieee")
    dq = tl.dot(ds1, k1, dq, input_precision="ieee")
    dk0 = tl.dot(ds0.T, q, dk0, input_precision="ieee")
    dk1 = tl.dot(ds1.T, q, dk1, input_precision="ieee")
    return dq, dk0, dk1, dv0, dv1


@jit(_SIZES)
def _attention_grad_kernel(
    queries, keys, values, dout, dqueries, dkeys, dvalues, tokens, heads, D,
    of_sample, of_head, of_token, scale,
    A: tl.constexpr, B: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The gradients of one head's queries, keys and values, side by side in memory."""
    sample = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    start = sample * of_sample + head * of_head
    width = heads * D
    dout += sample * tokens * width + head * D
    to = sample * tokens * 3 * width + head * D
    q0 = _loaded(queries + start, 0, tokens, of_token, D, A, BD)
    k0 = _loaded(keys + start, 0, tokens, of_token, D, A, BD)
    k1 = _loaded(keys + start, A, tokens, of_token, D, B, BD)
    v0 = _loaded(values + start, 0, tokens, of_token, D, A, BD)
    v1 = _loaded(values + start, A, tokens, of_token, D, B, BD)
    g0 = _loaded(dout, 0, tokens, width, D, A, BD)
    q1 = _loaded(queries + start, A, tokens, of_token, D, B, BD)
    g1 = _loaded(dout, A, tokens, width, D, B, BD)
    dk0 = tl.zeros((A, BD), tl.float32)
    dk1 = tl.zeros((B, BD), tl.float32)
    dv0 = tl.zeros((A, BD), tl.float32)
    dv1 = tl.zeros((B, BD), tl.float32)
    dq, dk0, dk1, dv0, dv1 = _gradients(q1, g1, k0, k1, v0, v1, dk0, dk1, dv0, dv1, tokens, scale)
    _stored(dqueries + to, dq, A, tokens, 3 * width, D, B, BD)
    dq, dk0, dk1, dv0, dv1 = _gradients(q0, g0, k0, k1, v0, v1, dk0, dk1, dv0, dv1, tokens, scale)
    _stored(dqueries + to, dq, 0, tokens, 3 * width, D, A, BD)
    _stored(dkeys + to, dk0, 0, tokens, 3 * width, D, A, BD)
    _stored(dkeys + to, dk1, A, tokens, 3 * width, D, B, BD)
    _stored(dvalues + to, dv0, 0, tokens, 3 * width, D, A, BD)
    _stored(dvalues + to, dv1, A, tokens, 3 * width, D, B, BD)


WARPS = 4


def _sizes(tokens: int, width: int) -> dict[str, int]:
    """The two parts of the tokens: powers of two, and no tile is smaller than 16."""
    first = max(16, pow2(tokens) // 2)
    return {"A": first, "B": max(16, pow2(tokens - first)), "BD": max(16, pow2(width))}


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    samples, heads, tokens, width = queries.shape
    out = queries.new_empty(samples, tokens, heads, width)
    launch(
        _attention_kernel, (samples * heads,), queries, keys, values, out, tokens, heads, width,
        *queries.stride()[:3], width**-0.5, **_sizes(tokens, width), num_warps=WARPS,
    )  # fmt: skip
    return out.transpose(1, 2)


def attention_backward(
    dout: Tensor, queries: Tensor, keys: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values: parts of one tensor (samples, tokens, 3, heads, D)."""
    samples, heads, tokens, width = queries.shape
    dout = dout.transpose(1, 2).contiguous()
    joined = queries.new_empty(samples, tokens, 3, heads, width)
    dq, dk, dv = (part.transpose(1, 2) for part in joined.unbind(2))
    sizes = _sizes(tokens, width)
    # With fewer registers three programs fit where two would, unless the numbers need them.
    fewer = {"maxnreg": 168} if sizes["A"] * sizes["BD"] <= 64 * 64 else {}
    launch(
        _attention_grad_kernel, (samples * heads,), queries, keys, values, dout, dq, dk, dv,
        tokens, heads, width, *queries.stride()[:3], width**-0.5, **sizes, num_warps=WARPS, **fewer,
    )  # fmt: skip
    return dq, dk, dv
