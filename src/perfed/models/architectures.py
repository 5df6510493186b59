"""The networks that ship with perfed, and how a user's own is found.

An architecture is options plus ``build(input_shape, classes)``. A user's own module needs no
registration: ``models: my_package.nets:MyNet`` calls ``MyNet(input_shape, classes)``, with
``vocabulary=`` where it has such an argument, or ``MyNet()`` where it takes none of these.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from perfed.core.errors import ConfigError, did_you_mean, shape_text
from perfed.core.inputs import Inputs, Kind
from perfed.core.objects import (
    GIVEN,
    give,
    give_again,
    import_object,
    path_or_name,
    tell_whereabouts,
    whereabouts,
)
from perfed.core.registry import Component, Registry
from perfed.core.schema import option

Shape = tuple[int, ...]


class Architecture(Component):
    """What kind of network; equal architectures have equal labels and can share weights."""

    registry: ClassVar[Registry[Architecture]]
    takes: ClassVar[Kind | None] = "numbers"
    """What its samples must be; None: whatever there is."""

    def build(self, input_shape: Shape, classes: int) -> nn.Module:
        """The network, where the shape of a sample is all it needs to know."""
        raise NotImplementedError

    def build_for(self, inputs: Inputs, classes: int) -> nn.Module:
        """The network; one for tokens asks ``inputs`` how many there are."""
        return self.build(inputs.shape, classes)

    def head_in(self, module: nn.Module) -> str:
        """The name of the last layer in what :meth:`build` has made: what comes before it gives
        features, it makes logits of them. Empty where there is none."""
        return last_linear(module)

    def redraw(self, module: nn.Module) -> None:
        """Draw the weights of what :meth:`build` has made anew, where it makes no draws."""

    def address(self) -> str:
        """By which its initial weights are drawn."""
        return self.label()


def last_linear(module: nn.Module) -> str:
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return linear[-1] if linear else ""


class LayerList(Architecture):
    """A network that is one layer after another: its head is the last of them."""

    def head_in(self, module: nn.Module) -> str:
        assert isinstance(module, nn.Sequential)
        return str(len(module) - 1)


class ArchitectureRegistry(Registry[Architecture]):
    """Takes any ``nn.Module`` beside the registered ones: by import path, class, factory, or built
    already."""

    def build(self, value: Any) -> Architecture:
        if isinstance(value, nn.Module):
            state = [repr(value).encode(), *map(_bytes, value.state_dict().values())]
            return Imported(factory=give(value, type(value).__name__, *state))
        if isinstance(value, type) and issubclass(value, Architecture):
            return super().build(value)
        if callable(value):
            return Imported(factory=path_or_name(value))
        if isinstance(value, str) and ":" in value and value not in self:
            found = import_object(value)
            if not (isinstance(found, type) and issubclass(found, Architecture)):
                return Imported(factory=value)
        return super().build(value)


architectures = ArchitectureRegistry("architecture")
Architecture.registry = architectures


def check_image(shape: Shape, name: str, smallest: int) -> None:
    if len(shape) == 2:
        raise ConfigError(
            f"'{name}' needs images, channels×height×width; this data is {shape_text(shape)}: "
            "if these are pictures of one channel, set data.layout: HW",
            "models",
        )
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise ConfigError(
            f"'{name}' needs images of at least {smallest}×{smallest}; "
            f"this data is {shape_text(shape)}",
            "models",
        )


@architectures.register("mlp")
@dataclass(frozen=True)
class MLP(LayerList):
    """A multilayer perceptron with ReLU, for any input."""

    hidden: tuple[int, ...] = option((64,), "units of each hidden layer", ge=1)

    def build(self, input_shape: Shape, classes: int) -> nn.Module:
        widths = [int(torch.Size(input_shape).numel()), *self.hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


@architectures.register("cnn")
@dataclass(frozen=True)
class CNN(LayerList):
    """The paper's CNN: two convolutions with max-pooling, hidden layers 120, 100, 84, 50.

    The paper does not give the convolutions. Theirs are LeNet's (6 and 16 channels, 5×5), whose
    hidden widths the paper's list extends; images smaller than 28×28 get padded 3×3 ones.
    """

    batchnorm: bool = option(False, "BatchNorm after each convolution")

    def build(self, input_shape: Shape, classes: int) -> nn.Module:
        check_image(input_shape, "cnn", 8)
        kernel, padding = (5, 0) if min(input_shape[1:]) >= 28 else (3, 1)
        layers: list[nn.Module] = []
        for before, after in ((input_shape[0], 6), (6, 16)):
            layers.append(nn.Conv2d(before, after, kernel, padding=padding))
            layers += [nn.BatchNorm2d(after)] if self.batchnorm else []
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
        height, width = (((n - kernel + 1 + 2 * padding) // 2) for n in input_shape[1:])
        height, width = (((n - kernel + 1 + 2 * padding) // 2) for n in (height, width))
        layers.append(nn.Flatten())
        for before, after in pairwise((16 * height * width, 120, 100, 84, 50)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(50, classes))


@dataclass(frozen=True)
class VGG(LayerList):
    """VGG for small images: convolutions, then 512 → 512 → 512 → classes.

    The paper's cost column shows that its "VGG" is this one (9.75 million parameters for VGG11),
    not torchvision's with its 128-million-parameter classifier.
    """

    dropout: float = option(0.0, "dropout before each hidden classifier layer", ge=0, lt=1)

    blocks: ClassVar[tuple[tuple[int, ...], ...]]
    batchnorm: ClassVar[bool]

    def build(self, input_shape: Shape, classes: int) -> nn.Module:
        check_image(input_shape, self.registered_name, 16)
        layers: list[nn.Module] = []
        channels = input_shape[0]
        small = min(input_shape[1:]) < 32  # five halvings of 28 end in 1 only if they round up
        for block in self.blocks:
            for width in block:
                layers.append(nn.Conv2d(channels, width, 3, padding=1))
                layers += [nn.BatchNorm2d(width)] if self.batchnorm else []
                layers.append(nn.ReLU())
                channels = width
            layers.append(nn.MaxPool2d(2, ceil_mode=small))
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        for _ in range(2):
            layers += [nn.Dropout(self.dropout)] if self.dropout else []
            layers += [nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(512, classes))


_VGG11 = ((64,), (128,), (256, 256), (512, 512), (512, 512))
_VGG13 = ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512))


@architectures.register("vgg11")
@dataclass(frozen=True)
class VGG11(VGG):
    """VGG11 for small images: 9,750,922 parameters with ten classes and three channels."""

    blocks, batchnorm = _VGG11, False


@architectures.register("vgg11-bn")
@dataclass(frozen=True)
class VGG11BN(VGG):
    """VGG11 with BatchNorm: 9,756,426 parameters."""

    blocks, batchnorm = _VGG11, True


@architectures.register("vgg13")
@dataclass(frozen=True)
class VGG13(VGG):
    """VGG13 for small images."""

    blocks, batchnorm = _VGG13, False


@architectures.register("vgg13-bn")
@dataclass(frozen=True)
class VGG13BN(VGG):
    """VGG13 with BatchNorm."""

    blocks, batchnorm = _VGG13, True


@architectures.register("imported")
@dataclass(frozen=True)
class Imported(Architecture):
    """Your own ``nn.Module``: in short ``models: ['net.py:MyNet']``, or the object in Python."""

    factory: str = option(
        "",
        "file.py:Name or package.module:Name; called with (input_shape, classes), or nothing; with "
        "vocabulary= where it takes that",
    )
    head: str = option("", "the name of its last layer, where that is not its last Linear")
    takes: ClassVar[Kind | None] = None

    def head_in(self, module: nn.Module) -> str:
        if self.head and self.head not in dict(module.named_modules()):
            known = [name for name, _ in module.named_modules() if name]
            hint = did_you_mean(self.head, known)
            raise ConfigError(f"'{self.label()}' has no layer '{self.head}'{hint}", "models.head")
        return self.head or last_linear(module)

    def address(self) -> str:
        """Without the folder of its file: each site may have the same file in another one."""
        file, _, name = self.factory.rpartition(":")
        return replace(self, factory=f"{Path(file).name}:{name}").label()

    def build_for(self, inputs: Inputs, classes: int) -> nn.Module:
        found = import_object(self.factory)
        if isinstance(found, nn.Module):
            return copy.deepcopy(found)
        if not callable(found):
            raise ConfigError(f"'{self.label()}' is neither an nn.Module nor makes one", "models")
        given = _arguments(found, inputs, classes)
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        positional = [given.pop(name) for name in ("input_shape", "classes") if name in given]
        try:
            module = found(*positional, **given)
        except Exception as error:  # whatever a user's own code raises
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self.label()}({shown}) failed: {reason}", "models") from None
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"{self.label()}({shown}) made a {type(module).__name__}, not an nn.Module",
                "models",
            )
        return module

    def redraw(self, module: nn.Module) -> None:
        if not isinstance(import_object(self.factory), nn.Module):
            return
        for name, layer in module.named_modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
            elif any(True for _ in layer.parameters(recurse=False)):
                raise ConfigError(
                    f"'{self.label()}' is built already, and '{name}' in it has no "
                    "reset_parameters() to draw other weights: give its class instead",
                    "models",
                )

    def label(self) -> str:
        return self.factory.removeprefix(GIVEN) + (f"(head={self.head})" if self.head else "")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """To a worker: with the object itself, where it is known by no other name."""
        value = import_object(self.factory) if self.factory.startswith(GIVEN) else None
        return _sent, (self.factory, self.head, whereabouts(self.factory), value)


def _sent(factory: str, head: str, file: tuple[str, str], value: Any) -> Imported:
    tell_whereabouts(*file)
    if value is not None:
        give_again(factory, value)
    return Imported(factory=factory, head=head)


def _arguments(factory: Callable[..., Any], inputs: Inputs, classes: int) -> dict[str, Any]:
    """What a user's own network is called with."""
    both = {"input_shape": inputs.shape, "classes": classes}
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # written in C
        return both
    says = inputs.tokens is not None and "vocabulary" in parameters
    extra = {"vocabulary": inputs.vocabulary} if says else {}
    others = [parameter for name, parameter in parameters.items() if name not in extra]
    return extra if _takes_no_shape(others) else both | extra


def _takes_no_shape(parameters: Sequence[inspect.Parameter]) -> bool:
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return False
    needed = [p for p in positional if p.default is p.empty]
    return not needed and not {"input_shape", "classes"} & {p.name for p in positional}


def _bytes(tensor: torch.Tensor) -> bytes:
    if is_lazy(tensor):  # it has no numbers yet
        return b""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
