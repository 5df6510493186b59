"""The networks people compare with: as many parameters as the literature says, and stacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from perfed.core.errors import ConfigError
from perfed.engines.stacked.stack import StackedModule
from perfed.models import Models, architectures, build_module, find_head, parameter_count

# Small pictures, ten classes: as the CIFAR-10 versions of these networks are known.
KNOWN = {
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "resnet101": 42_512_970,
    "resnet152": 58_156_618,
    "googlenet": 6_166_250,
    "mobilenet-v2": 2_236_682,
}
SMALL: list[Any] = [
    {"name": "resnet8", "norm": "group"},
    "resnet10",
    "mobilenet-v2",
    "googlenet",
    {"name": "vit", "width": 12, "depth": 2, "dropout": 0.1},
]


def parameters(network: Any, shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> int:
    with torch.device("meta"):
        return parameter_count(architectures.build(network).build(shape, classes))


@pytest.mark.parametrize("name", KNOWN)
def test_a_network_has_the_parameters_it_is_known_for(name: str) -> None:
    assert parameters(name) == KNOWN[name]


def test_others_are_known_for_other_pictures() -> None:
    assert parameters("cnn4", (1, 28, 28)) == 582_026  # PFLlib's and HtFLlib's, MNIST
    assert parameters("mobilenet-v2", classes=1000) == 3_504_872  # ImageNet
    tiny = {"name": "vit", "patch": 16, "width": 192, "depth": 12, "heads": 3}
    assert parameters(tiny, (3, 224, 224), 1000) == 5_717_416  # ViT-Ti/16
    base = {"name": "vit", "patch": 16, "width": 768, "depth": 12, "heads": 12}
    assert parameters(base, (3, 224, 224), 1000) == 86_567_656  # ViT-B/16


@pytest.mark.parametrize("layers", [4, 6, 8, 10])
def test_a_short_resnet_is_a_long_one_cut_off(layers: int) -> None:
    """A stage of one block with w channels: two convolutions, a shortcut, three norms."""
    expected = 3 * 9 * 64 + 2 * 64
    for stage in range(layers // 2 - 1):
        width = 64 * 2**stage
        before = width if stage == 0 else width // 2
        shortcut = 0 if stage == 0 else before * width + 2 * width
        expected += 9 * before * width + 9 * width * width + 4 * width + shortcut
    assert parameters(f"resnet{layers}") == expected + 10 * width + 10


@pytest.mark.parametrize("network", SMALL, ids=str)
def test_they_are_stacked(network: Any) -> None:
    module = build_module(architectures.build(network), (2, 8, 8), 3)
    generator = torch.Generator().manual_seed(1)
    assert StackedModule(module, torch.randn(4, 2, 8, 8, generator=generator)).obstacle is None


@pytest.mark.parametrize("name", ["cnn4", "resnet8", "mobilenet-v2", "vit"])
def test_features_can_have_one_width(name: str) -> None:
    shape = (1, 16, 16)
    plain, wide = (architectures.build({"name": name, "features": n}) for n in (0, 512))
    assert find_head(wide, build_module(wide, shape, 5), shape)[1] == 512
    width = find_head(plain, build_module(plain, shape, 5), shape)[1]
    assert width == {"cnn4": 512, "resnet8": 256, "mobilenet-v2": 1280, "vit": 192}[name]


def test_a_group_of_networks_is_dealt_in_turn() -> None:
    models = Models(**Models.expand("htfe4"))
    dealt = [a.registered_name for a in models.deal(np.arange(6), 0)]
    assert dealt == ["cnn4", "googlenet", "mobilenet-v2", "resnet18", "cnn4", "googlenet"]
    assert [len(Models(**Models.expand(f"htfe{n}")).architectures) for n in (2, 3, 8, 9)] == [
        2,
        3,
        8,
        9,
    ]


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ({"name": "vit", "patch": 5}, "patch 5 does not divide pictures of 8×8"),
        ({"name": "vit", "heads": 5}, "5 do not divide width 192"),
        ("cnn4", "needs images of at least 16×16"),
        ({"name": "resnet18", "norm": "layer"}, "'layer' is none of 'batch', 'group'"),
    ],
)
def test_what_does_not_fit_is_said(network: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_module(architectures.build(network), (1, 8, 8), 5)


def test_the_last_block_of_a_vit_leaves_out_only_what_nobody_looks_at() -> None:
    torch.manual_seed(0)
    module = architectures.build({"name": "vit", "width": 12, "depth": 2}).build((3, 8, 8), 10)
    x = torch.randn(4, 3, 8, 8)
    parameters = list(module.parameters())
    found = []
    for last in (True, False):
        module[2].last = last
        y = module(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), parameters)])
    for less, all_of_it in zip(*found, strict=True):
        torch.testing.assert_close(less, all_of_it)
