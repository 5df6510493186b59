"""The models that a run or a site leaves behind, as modules."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from perfed.core import tensorfile
from perfed.core.errors import ConfigError, RunError, shape_text
from perfed.core.network import outputs
from perfed.core.predictor import What, predictor_of
from perfed.core.tree import OWN, Weights, find_not_finite
from perfed.models import last_linear

Make = Callable[[str], tuple[nn.Module, str]]
"""From a network's name to a module of its architecture, and the name of that one's last layer."""
MARK = re.compile(r"(\d+:)*:")
"""How names in a file begin that are no parameter of a network."""


class PredictorModule(nn.Module):
    """A model that is more than a network: its networks, and what it makes of their outputs."""

    def __init__(self, tensors: Mapping[str, Tensor], make: Make) -> None:
        super().__init__()
        self.networks = nn.ModuleList()
        self._heads: list[str] = []
        self._marks = [name for name in tensors if MARK.match(name)]
        for number, name in enumerate(self._marks):
            self.register_buffer(f"mark{number}", tensors[name])
        try:
            predictor = predictor_of(tensors)
        except (LookupError, ValueError, TypeError, RuntimeError) as error:
            raise RunError(f"the file holds no model: {error}") from None
        made: dict[int, tuple[nn.Module, str]] = {}  # a network may be asked for twice
        for weights, network in predictor.networks():
            if id(weights) not in made:
                module, head = make(network)
                made[id(weights)] = filled(module, weights.params), head
            module, head = made[id(weights)]
            self._heads.append(head)
            self.networks.append(module)

    def forward(self, x: Tensor) -> Tensor:
        marks = {name: self.get_buffer(f"mark{n}") for n, name in enumerate(self._marks)}
        return predictor_of(marks).logits(_Given(x, zip(self.networks, self._heads, strict=True)))


@dataclass(frozen=True)
class _Given:
    """The outputs of networks, which are asked for one after another, for some samples."""

    x: Tensor
    networks: Iterator[tuple[nn.Module, str]]

    @property
    def count(self) -> int:
        return len(self.x)

    def __call__(self, weights: Weights, what: What = "logits", network: str = OWN) -> Tensor:
        module, head = next(self.networks)
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return outputs(module, head, tensors, self.x, what)

    def on(self, features: Tensor, weights: Weights, network: str = OWN) -> Tensor:
        module, head = next(self.networks)
        layer = module.get_submodule(head) if head else module
        made: Tensor = layer(features)
        return made


def module_of(tensors: Mapping[str, Tensor], make: Make) -> nn.Module:
    """The model that a file holds."""
    if not any(MARK.match(name) for name in tensors):
        return filled(make(OWN)[0], tensors)
    return PredictorModule(tensors, make)


def filled(network: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of ``network`` with these parameters and buffers."""
    module = copy.deepcopy(network)
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    if own.keys() != tensors.keys():
        raise RunError("the file holds other tensors than the network has")
    for name, tensor in own.items():
        if not is_lazy(tensor) and tensor.shape != tensors[name].shape:
            found, must = shape_text(tensors[name].shape), shape_text(tensor.shape)
            raise RunError(f"'{name}' is {found}, the network's {must}")
        tensor.data = tensors[name]
    return module


def load_model(path: str | Path, network: nn.Module, head: str = "") -> nn.Module:
    """The model in a file, ``personal.safetensors`` of a site say, in evaluation mode.

    ``network`` is of the architecture that was trained; it is not changed, and its weights do not
    matter. Where a client predicts with more than one network, there are copies of it. ``head`` is
    the name of its last layer, where the model needs to know it and it is not its last Linear.
    """
    if not isinstance(network, nn.Module):
        raise ConfigError(f"expected a network, a torch.nn.Module, got {network!r}", "network")
    return load_with(Path(path), lambda name: (network, head or last_linear(network)))


def load_with(path: Path, make: Make) -> nn.Module:
    """The model in a file, in evaluation mode."""
    try:
        tensors = tensorfile.load(path)
        if broken := find_not_finite({"": [*tensors.items()]}):
            raise RunError(f"'{broken[1]}' is not finite")
        return module_of(tensors, make).eval()
    except RunError as error:
        raise RunError(f"{path}: {error}") from None
