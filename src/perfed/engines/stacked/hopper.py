# mypy: disable-error-code="no-untyped-call, no-any-return"
"""Convolutions and norms of a stack on a Hopper GPU.

In half precision; norms and depthwise convolutions in float32 as well (:mod:`.vendor` has the
others).

Images are logically (n, b, c, h, w) and lie in memory as (n, b, h, w, c); convolution weights are
logically (n, o, c, kh, kw) and lie as (n, o, kh, kw, c). What lies otherwise costs a copy.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from perfed.engines.stacked import triton_depthwise, triton_norms, triton_pooling
    from perfed.engines.stacked import triton_kernels as kernels
except ImportError:  # no Triton on this machine
    kernels = None  # type: ignore[assignment]

log = logging.getLogger("perfed")
Pair = tuple[int, int]
SMALL_PATCH = 64
"""Values in a patch up to which patches are gathered: a first layer's few channels."""

BEHIND = 3
"""Layers whose weight gradients may be under way while the other gradients go on: so long, what
they are made of stays in memory."""

LARGE = 1 << 16
"""Entries from which one pass over memory, instead of three, is worth a kernel of its own."""


KINDS = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels without matrix products take."""


def usable(x: Tensor) -> bool:
    return x.dtype in (torch.bfloat16, torch.float16) and normalises(x)


def normalises(x: Tensor) -> bool:
    """Whether the kernels without matrix products can be used, for norms and depthwise
    convolutions: in float32 as well."""
    return (
        x.dtype in KINDS
        and x.numel() // x.shape[0] < 2**30  # offsets within a client are 32 bits wide
        and available(x)
    )


def available(x: Tensor) -> bool:
    """Whether this GPU has kernels at all."""
    return kernels is not None and x.is_cuda and _works(x.device)


@functools.cache
def _works(device: torch.device) -> bool:
    """Whether kernels can be compiled for this GPU, found by trying."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        with torch.cuda.device(device):
            param, direction, rate = torch.zeros(3, 1, device=device)
            kernels.descend(param, direction, rate, None)
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


class Move(NamedTuple):
    """A parameter, where it goes, and its rounded copy, where one is kept."""

    param: Tensor
    direction: Tensor
    rounded: Tensor | None = None


def descend(moves: Sequence[Move], rate: Tensor) -> None:
    """param −= rate·direction, in float32 whatever the direction is in."""
    small = []
    for move in moves:
        param, direction, rounded = move
        if _has_kernel(move):
            kernels.descend(param, _like(param, direction, direction.dtype), rate, rounded)
        elif param.is_cuda:
            small.append(move)
        else:
            param.addcmul_(direction.to(param.dtype), rate, value=-1)
    if small:  # one kernel for many, each of which is over before the next has begun
        directions = [_like(m.param, m.direction, m.param.dtype) for m in small]
        torch._foreach_sub_([move.param for move in small], torch._foreach_mul(directions, rate))
        for param, _, rounded in small:
            if rounded is not None:
                rounded.copy_(param)


def _like(param: Tensor, direction: Tensor, dtype: torch.dtype) -> Tensor:
    """In its layout: one that differs would send all of them one by one."""
    if direction.stride() == param.stride():
        return direction.to(dtype)
    return torch.empty_like(param, dtype=dtype).copy_(direction)


def _has_kernel(move: Move) -> bool:
    param, direction, rounded = move
    alike = rounded is None or rounded.stride() == param.stride()
    wide = param.dtype == torch.float32 and param.numel() >= LARGE
    return alike and wide and usable(direction)


def _last(x: Tensor) -> Tensor:
    """(n, b, c, h, w) → contiguous (n, b, h, w, c); no copy if it lies so already."""
    return x.permute(0, 1, 3, 4, 2).contiguous()


def _padded(x: Tensor) -> Tensor:
    """As :func:`_last`, its channels filled up with zeros to a power of two."""
    n, batch, channels, height, width = x.shape
    y = x.new_empty(n, batch, height, width, kernels.pow2(channels))
    y[..., :channels] = x.permute(0, 1, 3, 4, 2)
    y[..., channels:] = 0
    return y


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

    ``bias_grad=False`` gives the bias no gradient: up to rounding it is zero when a BatchNorm with
    batch statistics follows, and computing it costs one more pass over the gradient.
    """
    out, channels, height, width = weight.shape[1:]
    patch = kernels.patch_size(height, width, channels)
    small = patch <= SMALL_PATCH and not x.requires_grad
    if not small:
        if channels % 8 or out % 8:  # the copy engine needs it
            return None
        n, batch, _, *size = x.shape
        images, matrices = (n, batch, *size, channels), (n, out, height, width, channels)
        if geometry[0] != (1, 1) and not kernels.strides(images, matrices, geometry):
            return None
    return _with_moments(Convolution, _own(x), weight, bias, geometry, small, bias_grad)


def _with_moments(function: Any, *inputs: Any) -> Tensor:
    """What a convolution gives, and with it the moments it found, for a BatchNorm after it."""
    moments: list[Any] = []
    y: Tensor = function.apply(*inputs, moments)
    y._moments = (moments[0], y._version)  # type: ignore[attr-defined]
    return y


def _own(x: Tensor) -> Tensor:
    """The same numbers, as nobody else has been given them, where a normalisation has made such a
    twin: the gradients of its two users then meet in its kernel, and need none for their sum."""
    twin, version = getattr(x, "_twin", (None, 0))
    if twin is None or version != x._version:
        return x
    x._twin = None, 0  # type: ignore[attr-defined]
    return twin


class Beside:
    """One backward pass's weight gradients, on a second stream of the GPU: nothing in the pass
    waits for them, and they keep the tensor cores busy while the chain of the other gradients waits
    for memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _second_stream(device)
        self._under_way: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()

    def run(
        self, ready: torch.cuda.Event, function: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        """What is there at the end of the pass. ``ready``: its inputs are."""
        torch.autograd.Variable._execution_engine.queue_callback(self._join)
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            result = function(*inputs)
            done = self._stream.record_event()
        self._under_way.append((done, inputs))  # whose memory is not given back until then
        if len(self._under_way) > BEHIND:
            torch.cuda.current_stream().wait_event(self._under_way.popleft()[0])
        return result

    def _join(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
        self._under_way.clear()


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def weight_gradients_beside(loss: Tensor) -> None:
    """Let them run beside the others in the backward pass of ``loss``: of those leaves that it uses
    once. The gradients of several uses are added up in the pass, which would have to wait."""
    beside = Beside(loss.device)
    uses: Counter[Any] = Counter()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and not uses[node]:
                waiting.append(node)
            uses[node] += 1
    for node, count in uses.items():
        if count == 1 and hasattr(node, "variable"):
            node.variable._beside = beside


def _gradients(
    ctx: Any,
    grad: Tensor,
    of_input: Callable[[Tensor, Tensor], Tensor],
    of_weight: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor | None, Tensor | None]:
    """Of a convolution's input and weight, each where it is asked for."""
    x, weight = ctx.saved_tensors
    of_x, of_w = ctx.needs_input_grad[:2]
    beside: Beside | None = getattr(ctx.leaf, "_beside", None)
    if beside is None or not of_w:
        return of_input(grad, weight) if of_x else None, of_weight(x, grad) if of_w else None
    ready = torch.cuda.current_stream(grad.device).record_event()
    dx = of_input(grad, weight) if of_x else None
    return dx, beside.run(ready, of_weight, x, grad)


def _bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Of (n, b, h, w, c)."""
    return grad.flatten(1, 3).sum(1, dtype=torch.float32).to(dtype)


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
        ctx.leaf, weight = weight, weight.permute(0, 1, 3, 4, 2).contiguous()
        x = _padded(x) if small else _last(x)
        ctx.save_for_backward(x, weight)
        ctx.small, ctx.geometry, ctx.bias_grad = small, geometry, bias_grad
        bias = None if bias is None else bias.contiguous()
        ctx.bias_dtype = None if bias is None else bias.dtype
        if small:
            y, found = kernels.small_forward(x, weight, bias, *geometry)
        else:
            y, found = kernels.conv_forward(x, weight, bias, geometry)
        moments.append(found)
        return _first(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        size, geometry = x.shape[2:4], ctx.geometry

        def of_input(grad: Tensor, weight: Tensor) -> Tensor:
            return _first(kernels.conv_input_grad(grad, weight, size, geometry))

        def of_weight(x: Tensor, grad: Tensor) -> Tensor:
            if ctx.small:
                return _first(kernels.small_weight_grad(x, grad, weight.shape[2:], *geometry))
            return _first(kernels.conv_weight_grad(x, grad, weight.shape[2:4], geometry))

        grad = _last(grads[0])
        dx, dw = _gradients(ctx, grad, of_input, of_weight)
        wanted = ctx.needs_input_grad[2] and ctx.bias_grad
        db = _bias_gradient(grad, ctx.bias_dtype) if wanted else None
        return dx, dw, db, None, None, None, None


def depthwise(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Pair, Pair, Pair]
) -> Tensor:
    """A convolution with a kernel (n, c, 1, kh, kw) for each channel."""
    return _with_moments(Depthwise, _own(x), weight, bias, geometry)


class Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: tuple[Pair, Pair, Pair],
        moments: list[Any],
    ) -> Tensor:
        ctx.leaf, kernel = weight, (weight.shape[3], weight.shape[4])
        x, weight = _last(x), triton_depthwise.by_tap(weight.squeeze(2))
        bias = None if bias is None else bias.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.kernel, ctx.geometry = kernel, geometry
        ctx.size, ctx.bias_dtype = tuple(x.shape[2:4]), None if bias is None else bias.dtype
        y, found = triton_depthwise.depthwise_forward(x, weight, kernel, bias, geometry)
        moments.append(found)
        return _first(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        size, kernel, geometry = ctx.size, ctx.kernel, ctx.geometry

        def of_input(grad: Tensor, weight: Tensor) -> Tensor:
            dx = triton_depthwise.depthwise_input_grad(grad, weight, kernel, size, geometry)
            return _first(dx)

        def of_weight(x: Tensor, grad: Tensor) -> Tensor:
            return triton_depthwise.depthwise_weight_grad(x, grad, kernel, geometry).unsqueeze(2)

        grad = _last(grads[0])
        dx, dw = _gradients(ctx, grad, of_input, of_weight)
        db = _bias_gradient(grad, ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None, None


def max_pool2d(x: Tensor, window: Pair, geometry: tuple[Pair, Pair, Pair]) -> Tensor:
    y: Tensor = MaxPooling.apply(_own(x), window, geometry)
    return y


class MaxPooling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Pair, geometry: tuple[Pair, Pair, Pair]) -> Tensor:
        y, places = triton_pooling.max_pool(_last(x), window, geometry)
        ctx.save_for_backward(places)
        ctx.how = (x.shape[3], x.shape[4]), window, geometry
        return _first(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        dx = triton_pooling.max_pool_backward(_last(grads[0]), places, *ctx.how)
        return _first(dx), None, None


class Deferred:
    """A layer that has not been applied yet: what comes next can run in the same kernel, forward
    and backward. Each of these says None where it cannot."""

    shared = False
    """Whether it may wait though several layers use it."""

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape

    def plus(self, other: Tensor) -> Deferred | None:
        return None

    def rectified(self, relu: int) -> Deferred | None:
        """By a ReLU, or a ReLU6 where ``relu`` is 6."""
        return None

    def pooled(self) -> Tensor | None:
        """Maxima of 2×2."""
        return None

    def activated(self) -> Tensor | None:
        """By a GELU."""
        return None

    def normed(self, weight: Tensor, bias: Tensor, eps: float) -> Deferred | None:
        """By LayerNorm over the last dimension."""
        return None

    def value_in(self, dtype: torch.dtype) -> Tensor:
        return self.value().to(dtype)

    def value(self) -> Tensor:
        raise NotImplementedError


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
    return BatchNormed(x, (weight.contiguous(), bias.contiguous(), mean, inv), first)


def batch_norm_evaluating(
    x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> Deferred:
    """With given statistics, and no gradient."""
    statistics = mean.contiguous(), (variance + eps).rsqrt().contiguous()
    return BatchNormed(x, (weight.contiguous(), bias.contiguous(), *statistics), x.shape[1])


class BatchNormed(Deferred):
    def __init__(
        self,
        x: Tensor,
        parameters: tuple[Tensor, ...],
        first: int,
        added: Tensor | None = None,
        relu: int = 0,
    ) -> None:
        super().__init__(x.shape)
        self._x, self._parameters, self._first = x, parameters, first
        self._added, self._relu = added, relu

    def plus(self, other: Tensor) -> Deferred | None:
        if self._added is not None or self._relu or other.shape != self.shape:
            return None
        if other.dtype != self._x.dtype:  # the sum would be in the wider of the two
            return None
        return BatchNormed(self._x, self._parameters, self._first, _own(other))

    def rectified(self, relu: int) -> Deferred | None:
        if self._relu:
            return None
        return BatchNormed(self._x, self._parameters, self._first, self._added, relu)

    def pooled(self) -> Tensor | None:
        return self._applied(pool=True) if self._added is None else None

    def value(self) -> Tensor:
        return self._applied(pool=False)

    def _applied(self, pool: bool) -> Tensor:
        after = kernels.After(self._relu, pool)
        y, twin = BatchNormalisation.apply(
            self._x, self._added, *self._parameters, self._first, after
        )
        y._twin = twin, y._version
        return y


class BatchNormalisation(torch.autograd.Function):
    """Normalise with these statistics, and what comes after; the result twice (:func:`_own`)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        inv: Tensor,
        first: int,
        after: Any,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        x = _last(x)
        other = None if added is None else _last(added)
        keep = any(ctx.needs_input_grad)
        y, winners = kernels.norm_apply(x, mean, inv, weight, bias, first, after, other, keep)
        y = _first(y)
        output = y if added is not None and after.relu else None
        ctx.save_for_backward(x, winners, weight, bias, mean, inv, output)
        ctx.first, ctx.after = first, after
        return y, y.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, winners, weight, bias, mean, inv, output = ctx.saved_tensors
        one, *second = (grad for grad in grads if grad is not None)
        rows = one.permute(0, 1, 3, 4, 2)
        dx, dw, db, passed = kernels.norm_backward(
            rows.contiguous() if kernels.row_stride(rows) is None else rows,
            x,
            winners,
            mean,
            inv,
            weight,
            bias,
            ctx.first,
            ctx.after,
            None if output is None else _last(output),
            *map(_last, second),
        )
        of_added = _first(passed) if ctx.needs_input_grad[1] else None
        nothing = None, None, None, None
        return _first(dx), of_added, dw.to(weight.dtype), db.to(bias.dtype), *nothing


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Deferred:
    return GroupNormed(x, weight.contiguous(), bias.contiguous(), groups, eps)


class GroupNormed(Deferred):
    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool = False
    ) -> None:
        super().__init__(x.shape)
        self._all = x, weight, bias, groups, eps
        self._relu = relu

    def rectified(self, relu: int) -> Deferred | None:
        return GroupNormed(*self._all, True) if relu == 1 and not self._relu else None

    def value(self) -> Tensor:
        y: Tensor = GroupNormalisation.apply(*self._all, self._relu)
        return y


class GroupNormalisation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool
    ) -> Tensor:
        x = _last(x)
        y, mean, inv = triton_norms.group_norm(x, weight, bias, groups, eps, relu)
        ctx.save_for_backward(x, mean, inv, weight, bias)
        ctx.relu = relu
        return _first(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inv, weight, bias = ctx.saved_tensors
        dx, dw, db = triton_norms.group_norm_backward(
            _last(grads[0]), x, mean, inv, weight, bias, ctx.relu
        )
        return _first(dx), dw.to(weight.dtype), db.to(bias.dtype), None, None, None
