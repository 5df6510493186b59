"""Networks for sequences: of measurements (steps × features), and of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn

from perfed.core.errors import ConfigError, shape_text
from perfed.core.inputs import Inputs, Kind
from perfed.core.schema import option
from perfed.models.architectures import Architecture, Shape, architectures


@dataclass(frozen=True)
class Recurrent(Architecture):
    """A GRU; the mean of what it gives at all steps goes into a linear layer."""

    hidden: int = option(32, "units of each layer and direction", ge=1)
    layers: int = option(1, "layers, one on top of the other", ge=1)
    both_ways: bool = option(False, "read the sequence from its end, too")
    dropout: float = option(0.0, "dropout before the last layer", ge=0, lt=1)

    def reader(self, width: int) -> nn.GRU:
        return nn.GRU(
            width, self.hidden, self.layers, batch_first=True, bidirectional=self.both_ways
        )

    def tail(self, classes: int) -> nn.Sequential:
        return _tail([self.hidden * (2 if self.both_ways else 1), classes], self.dropout)


@architectures.register("gru")
@dataclass(frozen=True)
class GRU(Recurrent):
    """A GRU (Cho et al. 2014) over measurements, steps × features, and a linear layer on the mean
    of what it gives."""

    def build(self, input_shape: Shape, classes: int) -> nn.Module:
        if len(input_shape) != 2:
            raise ConfigError(
                f"'gru' needs sequences, steps×features; this data is {shape_text(input_shape)}",
                "models",
            )
        return _Read(nn.Identity(), self.reader(input_shape[1]), self.tail(classes))


@dataclass(frozen=True)
class TokenNetwork(Architecture):
    """A network for samples that are one token after another."""

    width: int = option(32, "numbers for each token", ge=1)
    padding: int = option(
        -1, "the token that fills short samples up, which has no part in the mean; -1: none", ge=-1
    )
    takes: ClassVar[Kind | None] = "tokens"

    def embedding(self, inputs: Inputs) -> nn.Embedding:
        """A row of numbers for each token there is."""
        if len(inputs.shape) != 1:
            raise ConfigError(
                f"'{self.registered_name}' needs one token after another; a sample of this data is "
                f"{inputs}",
                "models",
            )
        if self.padding >= inputs.vocabulary:
            last = inputs.vocabulary - 1
            raise ConfigError(f"is {self.padding}, tokens are 0 … {last}", "models.padding")
        return nn.Embedding(inputs.vocabulary, self.width)


@architectures.register("token-mean")
@dataclass(frozen=True)
class TokenMean(TokenNetwork):
    """A row of numbers for each token, and the mean of a sample's: the order of its words says
    nothing (fastText, Joulin et al. 2017)."""

    hidden: tuple[int, ...] = option((), "units of each hidden layer, with ReLU", ge=1)
    dropout: float = option(0.0, "dropout before the last layer", ge=0, lt=1)

    def build_for(self, inputs: Inputs, classes: int) -> nn.Module:
        tail = _tail([self.width, *self.hidden, classes], self.dropout)
        return _Read(self.embedding(inputs), None, tail, self.padding)


@architectures.register("token-gru")
@dataclass(frozen=True)
class TokenGRU(TokenNetwork, Recurrent):
    """A row of numbers for each token, and a GRU over them."""

    def build_for(self, inputs: Inputs, classes: int) -> nn.Module:
        embedding, reader = self.embedding(inputs), self.reader(self.width)
        return _Read(embedding, reader, self.tail(classes), self.padding)


def _tail(widths: Sequence[int], dropout: float) -> nn.Sequential:
    """Linear layers, the last of which is the head."""
    *hidden, (last, classes) = pairwise(widths)
    layers: list[nn.Module] = []
    for before, after in hidden:
        layers += [nn.Linear(before, after), nn.ReLU()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(last, classes))


class _Read(nn.Module):
    """A sequence, read to its end; the mean over its steps; linear layers."""

    def __init__(
        self, embedding: nn.Module, reader: nn.GRU | None, tail: nn.Module, padding: int = -1
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.reader = reader
        self.tail = tail
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        steps = self.embedding(x)
        if self.reader is not None:
            steps, _ = self.reader(steps)
        logits: Tensor = self.tail(steps.mean(1) if self.padding < 0 else self._mean(steps, x))
        return logits

    def _mean(self, steps: Tensor, x: Tensor) -> Tensor:
        """Of those steps that are no padding."""
        counts = (x != self.padding).to(steps.dtype)
        return (steps * counts[..., None]).sum(1) / counts.sum(1, keepdim=True).clamp(min=1)
