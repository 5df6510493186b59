"""The Triton kernels against the plain rules, on a CPU, by Triton's interpreter.

Skipped where Triton is not installed, or where its interpreter does not know NumPy (2.3 and later).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from perfed.engines.stacked import hopper

pytest.importorskip("triton")
if hopper.kernels is None:
    pytest.skip("this Triton is too old for the kernels", allow_module_level=True)

SCRIPT = """
import torch
from torch import nn
from perfed.engines.stacked import hopper
from perfed.engines.stacked.layers import Tensors
from perfed.engines.stacked.plan import plan_of

module = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(),
    nn.Flatten(), nn.Linear(24 * 16, 5),
)
named = [*module.named_parameters(), *module.named_buffers()]
x = torch.randn(2, 6, 3, 8, 8)


def results(kernels, training, first, diverged=None):
    hopper.usable = hopper.normalises = lambda tensor: kernels
    torch.manual_seed(1)
    own = {name: torch.rand(2, *t.shape).to(t.dtype) for name, t in named}
    rest = {name: 2 * own[name] for name, _ in module.named_buffers()}
    for name, _ in module.named_parameters():
        own[name] = hopper.dense_layout(own[name] - 0.4)
        if diverged is not None:
            own[name][diverged] = torch.nan
        own[name].requires_grad_()
    plan = plan_of(module.train(training))
    tensors = Tensors(own) if first is None else Tensors(own, first, rest)
    if not training:
        with torch.no_grad():
            return [plan.run(tensors, x)]
    y = plan.run(tensors, x)
    # The biases in front of BatchNorm have no gradient but for rounding.
    names = [n for n, t in own.items() if t.requires_grad and n not in ("0.bias", "4.bias")]
    weigh = torch.linspace(-1, 1, y.numel()).view_as(y)
    gradients = torch.autograd.grad((y * weigh).sum(), [own[name] for name in names])
    return [y, *gradients, *(own[name] for name, _ in module.named_buffers()), *rest.values()]


for training, first in ((True, 2), (True, None), (False, None)):
    for plain, fast in zip(results(False, training, first), results(True, training, first)):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
for plain, beside in zip(results(True, True, 2), results(True, True, 2, diverged=1)):
    torch.testing.assert_close(beside[0], plain[0])  # no model sees another, whatever becomes of it
param, grad = torch.randn(2, 3000)
moved = param.clone()
rounded = torch.empty(3000, dtype=torch.bfloat16)
hopper.kernels.descend(moved, grad, torch.tensor(0.1), rounded)
torch.testing.assert_close(moved, param - 0.1 * grad)
torch.testing.assert_close(rounded, moved.bfloat16())
"""


OTHERS = """
import torch
from torch.nn import functional as F
from perfed.engines.stacked import hopper, hopper_vectors, triton_norms, vendor

torch.manual_seed(0)
N = 2


def same(fast, plain, *leaves):
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-3)
    weigh = torch.randn_like(plain)
    found = torch.autograd.grad((fast * weigh).sum(), leaves, retain_graph=True)
    wanted = torch.autograd.grad((plain * weigh).sum(), leaves, retain_graph=True)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-3)


def leaf(*shape):
    return torch.randn(shape).requires_grad_()


def each(function, *stacked):
    return torch.stack([function(*one) for one in zip(*stacked)])


for channels, out, kernel, stride, padding in (
    (64, 72, 3, 2, 1), (64, 64, 1, 2, 0), (64, 16, 2, 2, 0), (192, 16, 3, 2, 1), (16, 24, 1, 1, 0)
):
    x, w = leaf(N, 16, channels, 8, 8), leaf(N, out, channels, kernel, kernel)
    geometry = (stride, stride), (padding, padding), (1, 1)
    y = hopper.conv2d(x, w, None, geometry, bias_grad=True)
    same(y, each(lambda x, w: F.conv2d(x, w, None, stride, padding), x, w), x, w)
x, w = leaf(N, 3, 64, 8, 8), leaf(N, 8, 64, 3, 3)
assert hopper.conv2d(x, w, None, ((2, 2), (1, 1), (1, 1)), bias_grad=True) is None  # an odd batch
for channels, kernel, stride, padding, dilation in (
    (16, 3, 1, 1, 1), (24, 3, 2, 1, 1), (20, 5, 2, 2, 1), (80, 3, 1, 2, 2), (64, 2, 3, 2, 1)
):
    x, w, b = leaf(N, 3, channels, 7, 6), leaf(N, channels, 1, kernel, kernel), leaf(N, channels)
    geometry = (stride, stride), (padding, padding), (dilation, dilation)
    plain = each(
        lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation, channels), x, w, b
    )
    same(hopper.depthwise(x, w, b, geometry), plain, x, w, b)
for channels, kernel, stride, padding, dilation in (
    (16, 3, 1, 1, 1), (24, 3, 2, 1, 1), (20, 2, 3, 1, 2), (64, 5, 2, 0, 1)
):
    x = torch.randint(-3, 3, (N, 3, channels, 9, 8)).float().requires_grad_()  # many are equal
    geometry = (stride, stride), (padding, padding), (dilation, dilation)
    plain = each(lambda x: F.max_pool2d(x, kernel, stride, padding, dilation), x)
    same(hopper.max_pool2d(x, (kernel, kernel), geometry), plain, x)
for first in (1, 2, 3):  # bands of rows that end where the first samples do, and that do not
    x, w = torch.randn(N, 4, 64, 8, 8), torch.randn(N, 64, 1, 3, 3)
    far = torch.full((N, 64), 1000.0)  # from zero, so that plain squares would say little
    y = hopper.depthwise(x, w, far, ((1, 1), (1, 1), (1, 1)))
    halves = y.split([first, 4 - first], 1)
    weight = torch.ones(N, 64)
    plain = [each(lambda y: F.batch_norm(y, None, None, training=True), half) for half in halves]
    norm = hopper.batch_norm(y, weight, 0 * weight, [], 0.1, 1e-5, first)
    torch.testing.assert_close(norm.value(), torch.cat(plain, 1), rtol=1e-3, atol=1e-3)
for channels, groups, relu in ((64, 2, 1), (64, 32, 0), (30, 3, 1), (96, 32, 1), (8, 8, 0)):
    x, w, b = leaf(N, 2, channels, 5, 5), leaf(N, channels), leaf(N, channels)
    norm = hopper.group_norm(x, w, b, groups, 1e-5)
    norm = norm.rectified(1) if relu else norm
    plain = each(lambda x, w, b: F.group_norm(x, groups, w, b), x, w, b)
    same(norm.value(), plain.relu() if relu else plain, x, w, b)
x, w, b = leaf(N, 5, 7, 20), leaf(N, 20), leaf(N, 20)
plain = each(lambda x, w, b: F.layer_norm(x, (20,), w, b, 1e-6), x, w, b)
same(hopper_vectors.layer_norm(x, w, b, 1e-6).value(), plain, x, w, b)
for inputs, outputs, rows in ((24, 40, 30), (16, 300, 21)):
    x, w, b = leaf(N, 3, rows, inputs), leaf(N, outputs, inputs), leaf(N, outputs)
    plain = each(F.linear, x, w, b)
    same(hopper_vectors.linear(x, w, b).value(), plain, x, w, b)
    same(hopper_vectors.linear(x, w, b).activated(), F.gelu(plain), x, w, b)
    residual, gain, shift = leaf(N, 3, rows, outputs), leaf(N, outputs), leaf(N, outputs)
    total = hopper_vectors.linear(x, w, b).plus(residual)
    norm = total.normed(gain, shift, 1e-5).value()
    normed = each(lambda t, g, s: F.layer_norm(t, (outputs,), g, s), residual + plain, gain, shift)
    leaves = x, w, b, residual, gain, shift
    same(norm, normed, *leaves)  # of the sum itself nobody knows
    total = hopper_vectors.linear(x, w, b).plus(residual)
    norm = total.normed(gain, shift, 1e-5).value()
    same(norm * total.value().sin(), normed * (residual + plain).sin(), *leaves)
    more = torch.randn_like(residual.flatten(1, 2))
    rows = more, more, torch.randn_like(more), gain, 1e-5, torch.bfloat16
    with torch.no_grad():
        wide, rounded, _ = triton_norms.layer_norm_backward(*rows)
    torch.testing.assert_close(rounded, wide.bfloat16())
for heads, tokens, width in ((2, 65, 16), (1, 7, 20), (3, 64, 32), (1, 100, 40), (2, 17, 16)):
    packed = leaf(3, tokens, 3 * heads * width)
    parts = [t.unflatten(-1, (heads, width)).transpose(1, 2) for t in packed.chunk(3, -1)]
    same(hopper_vectors.attention(*parts), F.scaled_dot_product_attention(*parts), packed)
for relu in (0, 1, 6):
    for added in (False, True):
        x, w, other = leaf(N, 4, 24, 4, 4), leaf(N, 24), leaf(N, 4, 24, 4, 4)
        b = (torch.randn(N, 24) + 2).requires_grad_()
        norm = hopper.batch_norm(x, w, b, [], 0.1, 1e-5, 4)
        norm = norm.plus(other) if added else norm
        norm = norm.rectified(relu) if relu else norm
        plain = each(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x, w, b)
        plain = plain + other if added else plain
        plain = plain.clamp(0, 6 if relu == 6 else None) if relu else plain
        same(norm.value(), plain, *([x, w, b, other] if added else [x, w, b]))
for cut in (8, 12):  # gradients that are parts of longer rows, and that lie otherwise
    x, w, b = leaf(N, 4, 24, 4, 4), leaf(N, 24), leaf(N, 24)
    y = hopper.batch_norm(x, w, b, [], 0.1, 1e-5, 2).rectified(1).value()
    rows = y.permute(0, 1, 3, 4, 2)
    fast = torch.cat([rows, rows[..., :cut]], 4) if cut == 8 else rows.permute(1, 2, 3, 4, 0).tanh()
    z = torch.cat([each(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), half, w, b)
                   for half in x.split(2, 1)], 1).relu().permute(0, 1, 3, 4, 2)
    plain = torch.cat([z, z[..., :cut]], 4) if cut == 8 else z.permute(1, 2, 3, 4, 0).tanh()
    same(fast, plain, x, w, b)
shape, pointwise = ((1, 1), (0, 0), (1, 1)), lambda x, w: F.conv2d(x, w)
for users in (1, 2, 3):  # of what a normalisation gives
    x, w, b = leaf(N, 4, 16, 4, 4), leaf(N, 16), leaf(N, 16)
    matrices = [leaf(N, 16, 16, 1, 1) for _ in range(users)]
    y = hopper.batch_norm(x, w, b, [], 0.1, 1e-5, 4).rectified(1).value()
    fast = sum(hopper.conv2d(y, matrix, None, shape, bias_grad=True) for matrix in matrices)
    norm = hopper.batch_norm(fast, w, b, [], 0.1, 1e-5, 4).plus(y).rectified(1).value()
    normed = lambda x, w, b: F.batch_norm(x, None, None, w, b, True)
    z = each(normed, x, w, b).relu()
    plain = sum(each(pointwise, z, matrix) for matrix in matrices)
    same(norm, (each(normed, plain, w, b) + z).relu(), x, w, b, *matrices)
hopper.normalises = lambda x: True
vendor.PATCHES_AT_ONCE = 1  # one client after the other
torch.backends.cudnn.allow_tf32 = False
for channels, out, kernel, stride, padding, dilation in (
    (16, 24, 3, 1, 1, 1), (20, 16, 3, 2, 1, 1), (24, 30, 5, 1, 2, 1), (140, 16, 2, 1, 0, 2),
    (16, 16, 1, 2, 0, 1), (16, 16, 1, 1, 1, 1), (3, 8, 3, 1, 1, 1), (16, 8, 3, 1, 4, 1),
):
    x, w, b = leaf(N, 3, channels, 7, 7), leaf(N, out, channels, kernel, kernel), leaf(N, out)
    geometry = (stride, stride), (padding, padding), (dilation, dilation)
    assert vendor._is_product(x, w, geometry)
    plain = each(lambda x, w, b: F.conv2d(x, w, b, stride, padding, dilation), x, w, b)
    same(vendor.conv2d(x, w, b, geometry), plain, x, w, b)
x = (torch.randn(N, 4, 24, 4, 4) + 1000).requires_grad_()  # in float32 their squares say nothing
w, b = leaf(N, 24), leaf(N, 24)
norm = hopper.batch_norm(x, w, b, [], 0.1, 1e-5, 4)
same(norm.value(), each(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), x, w, b), x, w, b)
"""

TRANSFORMER = """
import torch
import perfed
from perfed.engines.stacked import hopper
from perfed.engines.stacked.layers import Tensors
from perfed.engines.stacked.plan import plan_of

settings = {"name": "vit", "patch": 4, "width": 24, "depth": 2, "heads": 3}
module = perfed.architectures.build(settings).build((3, 8, 8), 5)
plan = plan_of(module)
x = torch.randn(2, 4, 3, 8, 8)


def results(kernels):
    hopper.usable = hopper.available = lambda tensor: kernels
    torch.manual_seed(1)
    own = {
        name: hopper.dense_layout(0.3 * torch.randn(2, *t.shape)).requires_grad_()
        for name, t in module.named_parameters()
    }
    y = plan.run(Tensors(own), x)
    weigh = torch.linspace(-1, 1, y.numel()).view_as(y)
    return [y, *torch.autograd.grad((y * weigh).sum(), list(own.values()))]


for plain, fast in zip(results(False), results(True)):
    torch.testing.assert_close(fast, plain, rtol=2e-3, atol=2e-4)
"""

BESIDE = """
import contextlib
import torch
from perfed.engines.stacked import hopper

hopper.usable = lambda tensor: True
later, launched = [], []  # what the second stream has not done yet, and all it was given


class Stream:
    lazy = False  # whether the second one works as late as it may, or at once
    device = torch.device("cpu")

    def __init__(self, *_):
        pass

    def record_event(self):
        return len(launched)

    def wait_event(self, event):
        if self is MAIN:
            work_off(event - len(launched) + len(later))

    def wait_stream(self, other):
        work_off(len(later))


def work_off(count):
    for _ in range(count):
        later.pop(0)()


@contextlib.contextmanager
def on_stream(stream):
    hopper.kernels.launch = given
    yield
    hopper.kernels.launch = at_once


def given(kernel, grid, *args, **options):
    launched.append(kernel)
    work = lambda: at_once(kernel, grid, *args, **options)
    later.append(work) if Stream.lazy else work()


MAIN, at_once = Stream(), hopper.kernels.launch
torch.cuda.Stream, torch.cuda.stream, torch.cuda.current_stream = Stream, on_stream, lambda *_: MAIN


def gradients(beside):
    torch.manual_seed(0)
    weights = [hopper.dense_layout(torch.randn(2, 16, 16, 1, 1)).requires_grad_() for _ in range(6)]
    y = torch.randn(2, 2, 16, 4, 4)
    for weight in [*weights, weights[0]]:  # the first one twice
        y = hopper.conv2d(y, weight, None, ((1, 1), (0, 0), (1, 1)), bias_grad=True).tanh()
    loss = y.square().sum()
    if beside:
        hopper.weight_gradients_beside(loss)
    return torch.autograd.grad(loss, weights)


plain = gradients(beside=False)
assert not launched
for Stream.lazy in (False, True):
    launched.clear()
    found = gradients(beside=True)
    assert len(launched) == 5 and not later
    assert all(torch.equal(a, b) for a, b in zip(found, plain))
"""

COMPILED = """
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from perfed.engines.stacked import (
    triton_attention, triton_depthwise, triton_kernels, triton_linear, triton_norms, triton_patches,
    triton_pooling,
)

KINDS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8"}


def compile(kernel, grid, *args, **options):
    names = [name for name in ("num_warps", "num_stages", "maxnreg") if name in options]
    how = {name: options.pop(name) for name in names}
    kinds = {}
    for parameter, value in zip(kernel.params, args):
        if isinstance(value, torch.Tensor):
            kinds[parameter.name] = KINDS[value.dtype]
        else:
            kinds[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    kinds |= dict.fromkeys(options, "constexpr")
    triton.compile(ASTSource(kernel, kinds, options), target=GPUTarget("cuda", 90, 32), options=how)


for module in (
    triton_attention, triton_depthwise, triton_kernels, triton_linear, triton_norms, triton_patches,
    triton_pooling,
):
    module.launch = compile
half = torch.bfloat16
for kind in (half, torch.float32):
    x, w = torch.zeros(1, 4, 8, 8, 64, dtype=kind), torch.zeros(1, 9, 64, dtype=kind)
    for stride in (1, 2):
        geometry = (stride, stride), (1, 1), (1, 1)
        y, _ = triton_depthwise.depthwise_forward(x, w, (3, 3), None, geometry)
        triton_depthwise.depthwise_input_grad(y, w, (3, 3), (8, 8), geometry)
        triton_depthwise.depthwise_weight_grad(x, y, (3, 3), geometry)
        y, places = triton_pooling.max_pool(x, (3, 3), geometry)
        triton_pooling.max_pool_backward(y, places, (8, 8), (3, 3), geometry)
    w, mean, after = torch.zeros(1, 64), torch.zeros(1, 1, 64), triton_kernels.After(6)
    triton_kernels.norm_stats(x, None, 4, [], 0.1, 1e-5)
    y, _ = triton_kernels.norm_apply(x, mean, mean, w, w, 4, after, x)
    triton_kernels.norm_backward(x, x, None, mean, mean, w, w, 4, after, y)
    y, mean, inv = triton_norms.group_norm(x, w, w, 2, 1e-5, True)
    triton_norms.group_norm_backward(y, x, mean, inv, w, w, True)
triton_patches.patches(x, (3, 3), (8, 8), ((1, 1), (1, 1), (1, 1)))
rows = torch.zeros(1, 40, 64)
product = rows.to(half)
triton_norms.layer_norm(rows, product, w, w, w, 1e-5, half)
triton_norms.layer_norm_backward(product, rows, rows, w, 1e-5, half)
triton_linear.gelu(product, w)
triton_linear.add_bias(product, w)
triton_linear.gelu_backward(product, product, w)
triton_linear.row_sums(product)
packed = torch.zeros(2, 65, 3 * 64, dtype=half)
parts = [t.unflatten(-1, (1, 64)).transpose(1, 2) for t in packed.chunk(3, -1)]
triton_attention.attention_backward(triton_attention.attention(*parts), *parts)
triton_kernels.descend(w, w, torch.zeros(1), w)
"""


@pytest.mark.skipif(
    tuple(map(int, np.__version__.split(".")[:2])) >= (2, 3), reason="Triton does not know NumPy"
)
@pytest.mark.parametrize(
    "script",
    [SCRIPT, OTHERS, TRANSFORMER, BESIDE],
    ids=["a network", "single layers", "a transformer", "a second stream"],
)
def test_kernels_give_what_the_plain_rules_give(script: str) -> None:
    run(script, TRITON_INTERPRET="1")


def test_kernels_compile_for_hopper_on_a_machine_without_a_gpu() -> None:
    run(COMPILED)


def run(script: str, **settings: str) -> None:
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"PYTHONPATH": str(source)} | settings
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
