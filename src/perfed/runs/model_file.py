"""The models that a run or a site leaves behind, as modules."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from perfed.core import tensorfile
from perfed.core.errors import ConfigError, RunError, shape_text, shown
from perfed.core.inputs import Inputs, precision_of
from perfed.core.network import caught
from perfed.core.predictor import What, predictor_of
from perfed.core.schema import from_mapping, plain, to_mapping
from perfed.core.tree import OWN, Weights, find_not_finite, moved_buffers
from perfed.data.needs import Needs
from perfed.engines import Population
from perfed.models import architectures, build_module, last_linear
from perfed.models.architectures import Imported

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
        return self.x.shape[0]  # which an exported graph asks anew each time

    def __call__(self, weights: Weights, what: What = "logits", network: str = OWN) -> Tensor:
        module, head = next(self.networks)
        return caught(module, head, lambda: module(self.x), what).to(precision_of(self.x))

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
    own = dict(module.named_parameters()) | moved_buffers(module)
    if own.keys() != tensors.keys():
        raise RunError("the file holds other tensors than the network has")
    for name, tensor in own.items():
        if not is_lazy(tensor) and tensor.shape != tensors[name].shape:
            found, must = shape_text(tensors[name].shape), shape_text(tensor.shape)
            raise RunError(f"'{name}' is {found}, the network's {must}")
        tensor.data = tensors[name]
    return module


@dataclass(frozen=True)
class Part:
    """One network of a model: what it is, what it takes, and how many numbers it gives."""

    architecture: Any
    """A name and options."""
    inputs: Inputs
    outputs: int
    between: bool = False
    """Whether it takes features of others: such a network has no head."""

    def build(self) -> tuple[nn.Module, str]:
        architecture = architectures.build(self.architecture)
        module = build_module(architecture, self.inputs, self.outputs)
        return module, "" if self.between else architecture.head_in(module)

    @property
    def is_built_in(self) -> bool:
        """Whether nothing is imported to build it."""
        name = self.architecture.get("name")
        if name == Imported.registered_name or name not in architectures:
            return False
        return architectures[name].__module__.startswith("perfed.")

    def to_mapping(self) -> dict[str, Any]:
        return {
            "architecture": self.architecture,
            "shape": list(self.inputs.shape),
            "vocabulary": self.inputs.vocabulary,
            "outputs": self.outputs,
            "between": self.between,
        }

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Part:
        inputs = Inputs.with_vocabulary(
            [int(n) for n in values["shape"]], int(values["vocabulary"])
        )
        return cls(
            dict(values["architecture"]), inputs, int(values["outputs"]), bool(values["between"])
        )


@dataclass(frozen=True)
class Blueprint:
    """What one must know to build a model from its file, and to use it."""

    parts: Mapping[str, Part]
    """By the name that the algorithm has for a network; a client's own is ``OWN``."""
    needs: Needs
    card: Mapping[str, str] = field(default_factory=dict)
    """Where it comes from: the run, the method."""

    @classmethod
    def of(cls, population: Population, client: int, needs: Needs, run: str) -> Blueprint:
        parts = {
            name: Part(plain(architecture), inputs, outputs, name in population.between)
            for name, (architecture, inputs, outputs) in population.networks_of(client).items()
        }
        return cls(parts, needs, {"run": run, "method": population.algorithm.label()})

    def text(self) -> str:
        """For the file itself."""
        parts = {name: part.to_mapping() for name, part in self.parts.items()}
        needs = to_mapping(self.needs)
        return json.dumps({"networks": parts, "needs": needs, "card": dict(self.card)})

    @classmethod
    def from_text(cls, text: str) -> Blueprint:
        try:
            values = json.loads(text)
            parts = {name: Part.from_mapping(part) for name, part in values["networks"].items()}
            card = {str(name): str(value) for name, value in values["card"].items()}
            return cls(parts, from_mapping(Needs, values["needs"]), card)
        except (AttributeError, RecursionError, *tensorfile.MALFORMED) as error:
            raise RunError(f"what it says of itself cannot be read: {error}") from None

    def make(self, network: str) -> tuple[nn.Module, str]:
        if network not in self.parts:
            raise RunError(f"the file holds a network '{network}', and nothing says what it is")
        return self.parts[network].build()

    def replaced(self, own: Part) -> Blueprint:
        """With another word on what the client's own network is."""
        return replace(self, parts={**self.parts, OWN: own})

    def check_built_in(self, but_own: bool = False) -> None:
        """A file from elsewhere must not say what is imported here."""
        for name, part in self.parts.items():
            if not part.is_built_in and not (but_own and name == OWN):
                own = shown(part.architecture.get("factory") or part.architecture.get("name"))
                raise RunError(
                    f"it was trained with a network of your own, {own}, which is not imported "
                    "because a file says so: give the network (--network)"
                )


def load_model(path: str | Path, network: nn.Module | None = None, head: str = "") -> nn.Module:
    """The model in a file, ``personal.safetensors`` of a site say, in evaluation mode.

    The file says which networks it holds. ``network`` is needed where the client's own is not one
    of perfed's, or the file is of an earlier version: a module of the architecture that was
    trained. It is not changed, and its weights do not matter. Where a client predicts with several
    models of it, there are copies. ``head`` is the name of its last layer, where the model needs to
    know it and it is not its last Linear.
    """
    if network is not None and not isinstance(network, nn.Module):
        raise ConfigError(f"expected a network, a torch.nn.Module, got {network!r}", "network")
    path = Path(path)
    about = tensorfile.load_described(path)[1]
    if not about and network is None:
        raise ConfigError(f"{path} does not say what it is: give the network", "network")
    with in_file(path):
        blueprint = Blueprint.from_text(about) if about else None
        if network is None:
            assert blueprint is not None
            blueprint.check_built_in()

    def make(name: str) -> tuple[nn.Module, str]:
        if blueprint is not None and (network is None or name in {*blueprint.parts} - {OWN}):
            return blueprint.make(name)
        assert network is not None
        return network, head or last_linear(network)

    return load_with(path, make)


def load_with(path: Path, make: Make) -> nn.Module:
    """The model in a file, in evaluation mode."""
    with in_file(path):
        tensors = tensorfile.load(path)
        if broken := find_not_finite({"": [*tensors.items()]}):
            raise RunError(f"'{broken[1]}' is not finite")
        return module_of(tensors, make).eval()


@contextmanager
def in_file(path: Path) -> Iterator[None]:
    """Errors say which file they are about."""
    try:
        yield
    except RunError as error:
        text = str(error)
        raise RunError(text if str(path) in text else f"{path}: {text}") from None
