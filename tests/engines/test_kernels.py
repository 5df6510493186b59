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

pytest.importorskip("triton")

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
    hopper.usable = lambda tensor: kernels
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


@pytest.mark.skipif(
    tuple(map(int, np.__version__.split(".")[:2])) >= (2, 3), reason="Triton does not know NumPy"
)
def test_kernels_give_what_the_plain_rules_give() -> None:
    source = Path(__file__).parents[2] / "src"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment)
