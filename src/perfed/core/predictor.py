"""Models that can be evaluated.

Each kind says in one method, ``logits``, what it makes of the networks it consists of. It does not
run them itself: it asks for their outputs on the samples at hand. So the same few lines serve an
engine, which runs many clients at once, and a module that was loaded from a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from perfed.core.tree import OWN, Weights

What = Literal["logits", "features"]


class Outputs(Protocol):
    """What networks say about the samples at hand."""

    @property
    def count(self) -> int:
        """How many samples there are."""

    def __call__(self, weights: Weights, what: What = "logits", network: str = OWN) -> Tensor:
        """Logits or features, a row for each sample. ``network`` is the client's own, or a name
        that the algorithm gave to a second one."""

    def on(self, features: Tensor, weights: Weights, network: str = OWN) -> Tensor:
        """What a network's last layer makes of features; of one between others, all of it."""


class Predictor(Protocol):
    """What ``Algorithm.models`` returns: :class:`Weights`, or one of the kinds below."""

    def logits(self, outputs: Outputs) -> Tensor:
        """A row of N numbers for each sample."""

    def tensors(self) -> dict[str, Tensor]:
        """All it consists of, as a file holds it; :func:`predictor_of` is the inverse."""

    def networks(self) -> list[tuple[Weights, str]]:
        """The networks it asks for, in that order, with their names."""


@dataclass(frozen=True)
class ClassPrior:
    """A model that looks at nothing: the same logits for every input."""

    prior: Tensor
    marker: ClassVar[str] = ":class_prior_logits"

    def logits(self, outputs: Outputs) -> Tensor:
        return self.prior.expand(outputs.count, -1)

    def tensors(self) -> dict[str, Tensor]:
        return {self.marker: self.prior}

    def networks(self) -> list[tuple[Weights, str]]:
        return []

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> ClassPrior:
        return cls(tensors[cls.marker])


@dataclass(frozen=True)
class Adjusted:
    """A network whose logits are scaled, and then moved: a label mix put back, say."""

    weights: Weights
    scale: Tensor
    offset: Tensor
    marker: ClassVar[str] = ":logit_offset"

    def logits(self, outputs: Outputs) -> Tensor:
        return self.scale * outputs(self.weights) + self.offset

    def tensors(self) -> dict[str, Tensor]:
        return self.weights.tensors() | {self.marker: self.offset, ":logit_scale": self.scale}

    def networks(self) -> list[tuple[Weights, str]]:
        return self.weights.networks()

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Adjusted:
        offset, scale = tensors.pop(cls.marker), tensors.pop(":logit_scale")
        return cls(Weights(tensors, {}), scale, offset)


@dataclass(frozen=True)
class Mixture:
    """Models whose class probabilities are averaged, each with its share."""

    models: Sequence[Predictor]
    shares: Tensor
    marker: ClassVar[str] = ":shares"

    def logits(self, outputs: Outputs) -> Tensor:
        said = torch.stack([model.logits(outputs).log_softmax(1) for model in self.models])
        return torch.logsumexp(said + self.shares.log()[:, None, None], dim=0)

    def tensors(self) -> dict[str, Tensor]:
        parts = enumerate(model.tensors() for model in self.models)
        named = {f"{number}:{name}": t for number, part in parts for name, t in part.items()}
        return named | {self.marker: self.shares}

    def networks(self) -> list[tuple[Weights, str]]:
        return [network for model in self.models for network in model.networks()]

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Mixture:
        shares = tensors.pop(cls.marker)
        parts: list[dict[str, Tensor]] = [{} for _ in shares]
        for name, tensor in tensors.items():
            number, _, inside = name.partition(":")
            parts[int(number)][inside] = tensor
        return cls([predictor_of(part) for part in parts], shares)


@dataclass(frozen=True)
class NearestPrototype:
    """The class whose prototype is nearest to a sample's features; logits are −‖f − prototype‖².

    A class with a count of zero has no prototype. It is never chosen: its logit is a little
    below that of the farthest prototype, so that the loss stays a number.
    """

    weights: Weights
    prototypes: Tensor
    """N×F."""
    counts: Tensor
    """Of how many samples each is the mean: of none where there is no prototype."""
    marker: ClassVar[str] = ":prototypes"
    BELOW: ClassVar[float] = 10.0

    def logits(self, outputs: Outputs) -> Tensor:
        features = outputs(self.weights, "features")
        logits = -torch.cdist(features, self.prototypes).square()
        lowest = logits.min(1, keepdim=True).values - self.BELOW
        return torch.where(self.counts > 0, logits, lowest)

    def tensors(self) -> dict[str, Tensor]:
        return self.weights.tensors() | {self.marker: self.prototypes, ":counts": self.counts}

    def networks(self) -> list[tuple[Weights, str]]:
        return self.weights.networks()

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> NearestPrototype:
        prototypes, counts = tensors.pop(cls.marker), tensors.pop(":counts")
        return cls(Weights(tensors, {}), prototypes, counts)


@dataclass(frozen=True)
class OfNetwork:
    """A model of a second network, which the algorithm gave this name."""

    weights: Weights
    network: str
    marker: ClassVar[str] = ":network:"

    def logits(self, outputs: Outputs) -> Tensor:
        return outputs(self.weights, network=self.network)

    def tensors(self) -> dict[str, Tensor]:
        return self.weights.tensors() | {self.marker + self.network: torch.zeros(0)}

    def networks(self) -> list[tuple[Weights, str]]:
        return [(self.weights, self.network)]

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> OfNetwork:
        (name,) = [name for name in tensors if name.startswith(cls.marker)]
        del tensors[name]
        return cls(Weights(tensors, {}), name.removeprefix(cls.marker))


@dataclass(frozen=True)
class Spliced:
    """The own network's head on features of two networks, side by side, after a third one that is
    between these and the head."""

    own: Weights
    second: Weights
    between: Weights
    names: tuple[str, str]
    """Of the second network, and of the one between."""
    marker: ClassVar[str] = ":spliced:"

    def logits(self, outputs: Outputs) -> Tensor:
        second, between = self.names
        features = [outputs(self.second, "features", second), outputs(self.own, "features")]
        spliced = outputs.on(torch.cat(features, 1), self.between, between)
        return outputs.on(spliced, self.own)

    def tensors(self) -> dict[str, Tensor]:
        parts = enumerate((self.own, self.second, self.between))
        named = {f"{n}:{name}": t for n, part in parts for name, t in part.tensors().items()}
        return named | {self.marker + ":".join(self.names): torch.zeros(0)}

    def networks(self) -> list[tuple[Weights, str]]:
        second, between = self.names
        return [(self.second, second), (self.own, OWN), (self.between, between), (self.own, OWN)]

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> Spliced:
        (mark,) = [name for name in tensors if name.startswith(cls.marker)]
        del tensors[mark]
        second, between = mark.removeprefix(cls.marker).split(":")
        parts: list[dict[str, Tensor]] = [{}, {}, {}]
        for name, tensor in tensors.items():
            number, _, inside = name.partition(":")
            parts[int(number)][inside] = tensor
        own, other, middle = (Weights(part, {}) for part in parts)
        return cls(own, other, middle, (second, between))


KINDS = (
    Mixture,
    ClassPrior,
    Adjusted,
    NearestPrototype,
    OfNetwork,
    Spliced,
)  # a mixture may hold others


def predictor_of(tensors: Mapping[str, Tensor]) -> Predictor:
    """The model that a file holds. A file does not tell parameters from buffers: all of a
    network's tensors are in ``params``."""
    for kind in KINDS:
        if any(name.startswith(kind.marker) for name in tensors):
            return kind.from_tensors(dict(tensors))
    return Weights(dict(tensors), {})
