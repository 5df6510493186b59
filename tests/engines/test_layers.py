"""The rules for stacks, each against PyTorch's own layer, client by client."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, vmap

from perfed.engines.stacked.layers import (
    chain_of,
    conv2d_by_columns,
    mapped_chain,
    max_of_pairs,
    with_rules,
)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def compare(module: nn.Module, shape: tuple[int, ...], clients: int = 3) -> None:
    """Outputs, gradients and buffers of a stack against those of its clients one by one."""
    torch.manual_seed(0)
    params = {
        name: torch.randn(clients, *p.shape, requires_grad=True)
        for name, p in module.named_parameters()
    }
    buffers = {
        name: torch.stack([b.clone() + 1 for _ in range(clients)])
        for name, b in module.named_buffers()
    }
    one_by_one = {name: b.clone() for name, b in buffers.items()}
    x = torch.randn(clients, *shape).mul(4).round().div(4).requires_grad_()  # with ties
    weigh = None
    chain = chain_of(module)
    assert chain is not None

    def mapped(p: dict[str, Tensor], b: dict[str, Tensor], x: Tensor) -> Tensor:
        y = mapped_chain(chain, p | b, x)
        assert y is not None
        return y

    together = vmap(mapped)(params, buffers, x)
    alone = torch.stack(
        [
            functional_call(
                module,
                {n: p[k] for n, p in params.items()} | {n: b[k] for n, b in one_by_one.items()},
                (x[k],),
            )
            for k in range(clients)
        ]
    )
    torch.testing.assert_close(together, alone)
    for name in buffers:
        torch.testing.assert_close(buffers[name], one_by_one[name])
    if together.requires_grad:
        weigh = torch.randn_like(alone)
        wanted = [*params.values(), x]
        expected = torch.autograd.grad((alone * weigh).sum(), wanted, retain_graph=True)
        for got, want in zip(
            torch.autograd.grad((together * weigh).sum(), wanted), expected, strict=True
        ):
            torch.testing.assert_close(got, want)


@given(
    channels=st.integers(1, 3),
    out=st.integers(1, 4),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    bias=st.booleans(),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
)
def test_convolutions(
    channels: int,
    out: int,
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    bias: bool,
    size: tuple[int, int],
) -> None:
    layer = nn.Conv2d(
        channels, out, kernel, stride=stride, padding=padding, dilation=dilation, bias=bias
    )
    compare(layer, (4, channels, *size))
    x, weight = torch.randn(2, 4, channels, *size), torch.randn(2, out, channels, kernel, kernel)
    plain = [
        nn.functional.conv2d(a, w, None, stride, padding, dilation)
        for a, w in zip(x, weight, strict=True)
    ]
    columns = conv2d_by_columns(x, weight, layer.stride, layer.padding, layer.dilation)
    torch.testing.assert_close(columns, torch.stack(plain))


def test_a_large_convolution() -> None:
    compare(nn.Conv2d(3, 8, 3, padding=1), (2, 3, 32, 32))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_batchnorm(affine: bool, tracked: bool, training: bool) -> None:
    for layer, shape in (
        (nn.BatchNorm2d(3, affine=affine, track_running_stats=tracked), (5, 3, 4, 6)),
        (nn.BatchNorm1d(3, affine=affine, track_running_stats=tracked), (5, 3)),
        (nn.BatchNorm1d(3, affine=affine, track_running_stats=tracked), (5, 3, 7)),
    ):
        compare(layer.train(training), shape)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [(8, 8), (32, 32)])
def test_layers_after_one_another(size: tuple[int, int], training: bool) -> None:
    """Small images stay with the batch last in memory from layer to layer, larger ones do not."""
    channels = 4 * (size[0] // 4) * (size[1] // 4)
    layers = [
        *(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(channels, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)),
    ]
    compare(nn.Sequential(*layers).train(training), (6, 1, *size))


@pytest.mark.parametrize("size", [(8, 8), (4, 6), (5, 8), (7, 7)])
@pytest.mark.parametrize("options", [{}, {"stride": 1}, {"padding": 1}])
def test_max_pooling_with_ties(size: tuple[int, int], options: dict[str, int]) -> None:
    compare(nn.MaxPool2d(2, **options), (3, 2, *size))


def test_pooling_by_pairs_takes_the_first_of_equals() -> None:
    x = torch.randint(0, 3, (2, 3, 2, 6, 8)).double().requires_grad_()
    ours = max_of_pairs(max_of_pairs(x, -1), -2)
    theirs = nn.functional.max_pool2d(x.flatten(0, 2)[:, None], 2).reshape(ours.shape)
    torch.testing.assert_close(ours, theirs)
    weigh = torch.randn_like(ours)
    (got,) = torch.autograd.grad((ours * weigh).sum(), x, retain_graph=True)
    (want,) = torch.autograd.grad((theirs * weigh).sum(), x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(6, 4), (5, 6)),
        (nn.Linear(6, 4, bias=False), (5, 3, 6)),
        (nn.Flatten(), (5, 2, 3, 4)),
        (nn.Flatten(2, -2), (5, 2, 3, 4, 2)),
        (nn.ReLU(), (5, 6)),
        (nn.GELU(), (5, 6)),
        (nn.AdaptiveAvgPool2d(1), (5, 2, 3, 4)),
        (nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 3))), (5, 6)),
    ],
)
def test_the_other_layers(layer: nn.Module, shape: tuple[int, ...]) -> None:
    compare(layer, shape)


class Doubling(nn.Linear):
    """Looks like a layer with a rule and is not."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_subclass_or_a_hooked_layer_has_no_rule() -> None:
    assert chain_of(nn.Sequential(nn.Flatten(), Doubling(4, 4))) is None
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert chain_of(hooked) is None


def test_rules_inside_a_module_without_one() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), Doubling(2 * 6 * 6, 3))
    fast = copy.deepcopy(module)
    with_rules(fast)
    tensors = {name: torch.randn(3, *p.shape) for name, p in module.named_parameters()}
    x = torch.randn(3, 4, 1, 8, 8)
    mapped = vmap(lambda t, a: functional_call(fast, t, (a,)))(tensors, x)
    plain = vmap(lambda t, a: functional_call(module, t, (a,)))(tensors, x)
    torch.testing.assert_close(mapped, plain)
