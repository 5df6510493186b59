"""The networks of the comparison, for every peer that runs torch."""

from __future__ import annotations

from torch import nn


def vgg11(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """perfed's, with BatchNorm: 9,756,426 parameters on 32×32×3."""
    from perfed.models import architectures

    return architectures["vgg11-bn"]().build(input_shape, classes)


class Cnn(nn.Sequential):
    """Two 5×5 convolutions of 32 and 64 channels: 582,026 parameters on 28×28×1."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        channels, height, width = input_shape
        flat = 64 * ((height - 4) // 2 - 4) // 2 * (((width - 4) // 2 - 4) // 2)
        super().__init__(
            nn.Conv2d(channels, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(flat, 512),
            nn.ReLU(),
            nn.Linear(512, classes),
        )


class Mlp(nn.Sequential):
    """One hidden layer of 64: 4,810 parameters on 64 features."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        (features,) = input_shape
        super().__init__(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, classes))


class DropoutCnn(nn.Sequential):
    """Two 3×3 convolutions of 32 and 64 channels, dropout before both linear layers."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        channels, height, width = input_shape
        super().__init__(
            nn.Conv2d(channels, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
            nn.Flatten(),
            nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, classes),
        )
