"""Convolutions by the vendor's libraries, client by client or as products, against PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from perfed.engines.stacked import vendor

# channels, out, kernel, stride, padding, dilation, groups
SHAPES = {
    "3×3": (8, 12, 3, 1, 1, 1, 1),
    "strided": (8, 12, 3, 2, 1, 1, 1),
    "dilated": (5, 7, 3, 2, 2, 2, 1),
    "1×1": (8, 12, 1, 1, 0, 1, 1),
    "1×1, strided": (8, 12, 1, 2, 0, 1, 1),
    "1×1, padded": (8, 12, 1, 1, 1, 1, 1),
    "few channels": (3, 4, 3, 1, 1, 1, 1),
    "depthwise": (6, 6, 3, 1, 1, 1, 6),
    "grouped": (6, 8, 3, 2, 1, 1, 2),
}


def leaves(shape: tuple[int, ...]) -> list[Tensor]:
    """Images, weights and biases of three clients."""
    channels, out, kernel, *_, groups = shape
    sizes = (3, 4, channels, 8, 8), (3, out, channels // groups, kernel, kernel), (3, out)
    return [torch.randn(size, dtype=torch.float64).requires_grad_() for size in sizes]


def by_pytorch(name: str, *stacked: Tensor) -> Tensor:
    *_, stride, padding, dilation, groups = SHAPES[name]
    each = zip(*stacked, strict=True)
    return torch.stack([F.conv2d(*one, stride, padding, dilation, groups) for one in each])


def by_vendor(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    *_, stride, padding, dilation, groups = SHAPES[name]
    geometry = ((stride, stride), (padding, padding), (dilation, dilation))
    return vendor.conv2d(x, weight, bias, geometry, groups)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("inputs_learn", [True, False])
def test_a_convolution_is_what_pytorch_gives(
    name: str, inputs_learn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "ROWS_OF_A_SHARE", 64)  # four shares of 256 rows
    x, weight, bias = leaves(SHAPES[name])
    x = x.requires_grad_(inputs_learn)
    found, plain = by_vendor(name, x, weight, bias), by_pytorch(name, x, weight, bias)
    torch.testing.assert_close(found, plain)
    weigh = torch.randn_like(plain)
    learning = [x, weight, bias] if inputs_learn else [weight, bias]
    gradients = torch.autograd.grad((found * weigh).sum(), learning)
    for gradient, wanted in zip(
        gradients, torch.autograd.grad((plain * weigh).sum(), learning), strict=True
    ):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_have_gradients(name: str) -> None:
    x, weight, _ = leaves(SHAPES[name])

    def convolution(x: Tensor, weight: Tensor) -> Tensor:
        return by_vendor(name, x, weight, None)

    assert torch.autograd.gradgradcheck(convolution, (x[:1, :1, :, :4, :4], weight[:1]))


def test_what_a_convolution_gives_may_be_changed_in_place() -> None:
    for name in ("3×3", "1×1"):
        x, weight, _ = leaves(SHAPES[name])
        y = by_vendor(name, x, weight, None)
        torch.autograd.grad(y.add_(1).square().sum(), [x, weight])


def test_a_bias_in_front_of_a_norm_has_no_gradient() -> None:
    x, weight, bias = leaves(SHAPES["3×3"])
    geometry = ((1, 1), (1, 1), (1, 1))
    y = vendor.conv2d(x, weight, bias, geometry, bias_grad=False)
    assert torch.autograd.grad(y.sum(), [bias], allow_unused=True) == (None,)
