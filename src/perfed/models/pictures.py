"""Networks for pictures beside the paper's: what people compare with, and bring themselves.

Those with ``features`` can give features of one width, whatever they are inside: they are averaged
or repeated to that many, as HtFLlib does it. Methods that compare the features of different
networks need that.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from perfed.core.errors import ConfigError
from perfed.core.schema import option
from perfed.models.architectures import Architecture, Shape, architectures, check_image


@dataclass(frozen=True)
class PictureNetwork(Architecture):
    """A body that gives features, and a linear layer on top."""

    features: int = option(
        0, "width of what goes into the last layer; 0: as many as the network has", ge=0
    )
    smallest: ClassVar[int] = 8
    """Height and width of a picture, at least."""

    @abstractmethod
    def body(self, channels: int, size: tuple[int, int]) -> tuple[list[nn.Module], int]:
        """Layers from a picture to features, and how many these are."""

    def build(self, input_shape: Shape, classes: int) -> nn.Module:
        check_image(input_shape, self.registered_name, self.smallest)
        channels, height, width = input_shape
        layers, count = self.body(channels, (height, width))
        if self.features:
            layers, count = [*layers, nn.AdaptiveAvgPool1d(self.features)], self.features
        return nn.Sequential(*layers, nn.Linear(count, classes))


def _normed(
    before: int, after: int, kernel: int, stride: int = 1, groups: int = 1, bias: bool = False
) -> list[nn.Module]:
    """A convolution that keeps the size, but for its stride, and BatchNorm."""
    convolution = nn.Conv2d(
        before, after, kernel, stride, padding=kernel // 2, groups=groups, bias=bias
    )
    return [convolution, nn.BatchNorm2d(after)]


class Added(nn.Module):
    """What two branches give, added up."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.branch(x) + self.shortcut(x)
        return total


class Joined(nn.Module):
    """The channels that several branches give, side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


@dataclass(frozen=True)
class ResNet(PictureNetwork):
    """He et al. 2016, with the stem for small pictures: one 3×3 convolution, no pooling."""

    norm: Literal["batch", "group"] = option(
        "batch", "batch: BatchNorm; group: GroupNorm, 32 channels a group"
    )
    blocks: ClassVar[tuple[int, ...]]
    """So many in each stage; a stage has twice the channels of the one before."""
    bottleneck: ClassVar[bool] = False

    def body(self, channels: int, size: tuple[int, int]) -> tuple[list[nn.Module], int]:
        layers = [*self._normed(channels, 64, 3), nn.ReLU()]
        count = 64
        for stage, blocks in enumerate(self.blocks):
            width = 64 * 2**stage
            for number in range(blocks):
                stride = 2 if stage and not number else 1
                layers += self._block(count, width, stride)
                count = width * (4 if self.bottleneck else 1)
        return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], count

    def _block(self, before: int, width: int, stride: int) -> list[nn.Module]:
        if self.bottleneck:
            after = 4 * width
            layers = [
                *self._normed(before, width, 1),
                nn.ReLU(),
                *self._normed(width, width, 3, stride),
                nn.ReLU(),
                *self._normed(width, after, 1),
            ]
        else:
            after = width
            layers = [
                *self._normed(before, width, 3, stride),
                nn.ReLU(),
                *self._normed(width, width, 3),
            ]
        shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            shortcut = nn.Sequential(*self._normed(before, after, 1, stride))
        return [Added(nn.Sequential(*layers), shortcut), nn.ReLU()]

    def _normed(self, before: int, after: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        convolution, norm = _normed(before, after, kernel, stride)
        return [convolution, nn.GroupNorm(after // 32, after) if self.norm == "group" else norm]


_RESNETS: dict[int, tuple[tuple[int, ...], bool]] = {
    4: ((1,), False),
    6: ((1, 1), False),
    8: ((1, 1, 1), False),
    10: ((1, 1, 1, 1), False),
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


def _register(layers: int, blocks: tuple[int, ...], bottleneck: bool) -> None:
    several = "s" if sum(blocks) > 1 else ""
    kind = f"bottleneck{several}" if bottleneck else f"block{several} of two convolutions"
    text = f"ResNet{layers} for small pictures: {sum(blocks)} {kind}."
    members = {
        "blocks": blocks,
        "bottleneck": bottleneck,
        "__doc__": text,
        "__module__": __name__,
        "__annotations__": {},
    }
    made = type(f"ResNet{layers}", (ResNet,), members)
    architectures.register(f"resnet{layers}")(dataclass(frozen=True)(made))


for _layers, _kind in _RESNETS.items():
    _register(_layers, *_kind)


@architectures.register("mobilenet-v2")
@dataclass(frozen=True)
class MobileNetV2(PictureNetwork):
    """Sandler et al. 2018, with fewer strides, for small pictures."""

    # Of each group: expansion, channels, blocks, stride.
    groups: ClassVar[tuple[tuple[int, int, int, int], ...]] = (
        (1, 16, 1, 1),
        (6, 24, 2, 1),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def body(self, channels: int, size: tuple[int, int]) -> tuple[list[nn.Module], int]:
        layers: list[nn.Module] = [*_normed(channels, 32, 3), nn.ReLU6()]
        count = 32
        for expansion, width, blocks, stride in self.groups:
            for number in range(blocks):
                layers.append(_inverted(count, width, expansion, 1 if number else stride))
                count = width
        layers += [*_normed(count, 1280, 1), nn.ReLU6()]
        return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], 1280


def _inverted(before: int, after: int, expansion: int, stride: int) -> nn.Module:
    """Widen, look around in each channel, narrow; the input is added where it fits."""
    inside = before * expansion
    widen = [*_normed(before, inside, 1), nn.ReLU6()] if expansion > 1 else []
    look = [*_normed(inside, inside, 3, stride, groups=inside), nn.ReLU6()]
    block = nn.Sequential(*widen, *look, *_normed(inside, after, 1))
    return Added(block, nn.Identity()) if stride == 1 and before == after else block


@architectures.register("googlenet")
@dataclass(frozen=True)
class GoogLeNet(PictureNetwork):
    """Szegedy et al. 2015 with BatchNorm, for small pictures: one 3×3 convolution as its stem, two
    3×3 ones for each 5×5."""

    # Of each module, channels: 1×1; before 3×3, 3×3; before 5×5, 5×5; after pooling. 0: pooling.
    modules: ClassVar[tuple[tuple[int, ...], ...]] = (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        (),
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        (),
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    )

    def body(self, channels: int, size: tuple[int, int]) -> tuple[list[nn.Module], int]:
        layers: list[nn.Module] = [*_normed(channels, 192, 3, bias=True), nn.ReLU()]
        count = 192
        for widths in self.modules:
            if not widths:
                layers.append(nn.MaxPool2d(3, 2, padding=1))
                continue
            layers.append(_inception(count, *widths))
            count = widths[0] + widths[2] + widths[4] + widths[5]
        return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()], count


def _inception(
    before: int, one: int, to_three: int, three: int, to_five: int, five: int, pooled: int
) -> nn.Module:
    def branch(*sizes: tuple[int, int, int]) -> nn.Sequential:
        layers = [(*_normed(*size, bias=True), nn.ReLU()) for size in sizes]
        return nn.Sequential(*(layer for part in layers for layer in part))

    return Joined(
        branch((before, one, 1)),
        branch((before, to_three, 1), (to_three, three, 3)),
        branch((before, to_five, 1), (to_five, five, 3), (five, five, 3)),
        nn.Sequential(nn.MaxPool2d(3, 1, padding=1), *branch((before, pooled, 1))),
    )


@architectures.register("cnn4")
@dataclass(frozen=True)
class CNN4(PictureNetwork):
    """The four layers that HtFLlib and PFLlib call CNN: two 5×5 convolutions, two linear layers."""

    smallest: ClassVar[int] = 16

    def body(self, channels: int, size: tuple[int, int]) -> tuple[list[nn.Module], int]:
        height, width = (((side - 4) // 2 - 4) // 2 for side in size)
        layers: list[nn.Module] = []
        for before, after in ((channels, 32), (32, 64)):
            layers += [nn.Conv2d(before, after, 5), nn.ReLU(), nn.MaxPool2d(2)]
        return [*layers, nn.Flatten(), nn.Linear(64 * height * width, 512), nn.ReLU()], 512


@architectures.register("vit")
@dataclass(frozen=True)
class ViT(PictureNetwork):
    """Vision Transformer (Dosovitskiy et al. 2021), small by default."""

    patch: int = option(4, "height and width of a patch; must divide those of the picture", ge=1)
    width: int = option(192, "numbers for each patch", ge=1)
    depth: int = option(6, "blocks", ge=1)
    heads: int = option(3, "attention heads; must divide 'width'", ge=1)
    dropout: float = option(0.0, "of what each block adds", ge=0, lt=1)
    smallest: ClassVar[int] = 1

    def validate(self) -> None:
        if self.width % self.heads:
            raise ConfigError(f"{self.heads} do not divide width {self.width}", "heads")

    def body(self, channels: int, size: tuple[int, int]) -> tuple[list[nn.Module], int]:
        if any(side % self.patch for side in size):
            shape = f"{size[0]}×{size[1]}"
            raise ConfigError(f"patch {self.patch} does not divide pictures of {shape}", "models")
        patches = size[0] * size[1] // self.patch**2
        blocks = [
            _Block(self.width, self.heads, self.dropout, last=number == self.depth - 1)
            for number in range(self.depth)
        ]
        start = _Patches(channels, self.patch, self.width, patches)
        return [start, *blocks, nn.LayerNorm(self.width, eps=1e-6), _First()], self.width


class _Patches(nn.Module):
    """A picture as a list of vectors: one to answer by, then one for each patch."""

    def __init__(self, channels: int, patch: int, width: int, patches: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, patch, patch)
        self.answer = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, patches + 1, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.project(x).flatten(2).transpose(1, 2)
        return torch.cat([self.answer.expand(x.shape[0], -1, -1), patches], 1) + self.places


class _Block(nn.Module):
    """The last one need not compute what nobody looks at: of its vectors only the first is used."""

    def __init__(self, width: int, heads: int, dropout: float, last: bool) -> None:
        super().__init__()
        self.heads, self.last = heads, last
        self.before = nn.LayerNorm(width, eps=1e-6)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width, eps=1e-6),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )
        self.drop = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        attended = self.drop(self._attended(self.before(x)))
        x = self._used(x) + attended
        thought: Tensor = x + self.drop(self.think(x))
        return thought

    def _attended(self, x: Tensor) -> Tensor:
        queries, keys, values = self.queries_keys_values(x).chunk(3, -1)
        seen = scaled_dot_product_attention(
            self._by_head(queries), self._by_head(keys), self._by_head(values)
        )
        joined: Tensor = self.joined(self._used(seen.transpose(1, 2).flatten(2)))
        return joined

    def _used(self, x: Tensor) -> Tensor:
        return x[:, :1] if self.last else x

    def _by_head(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (self.heads, -1)).transpose(1, 2)


class _First(nn.Module):
    """Of a list of vectors, the first."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]
