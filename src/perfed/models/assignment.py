"""Which client gets which architecture, and the check that it fits the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from perfed.core.errors import ConfigError
from perfed.core.schema import Options, option
from perfed.core.streams import numpy_stream, torch_stream
from perfed.core.tree import Weights
from perfed.models.architectures import Architecture, Shape


@dataclass(frozen=True)
class Models(Options):
    """``architectures`` from the smallest to the largest, and how they are dealt out."""

    architectures: tuple[Architecture, ...] = option(
        ("mlp",), "the networks in use, smallest first"
    )
    assign: Literal["by-size", "list"] = option(
        "by-size", "drawn, larger networks likelier for larger datasets; or as listed"
    )
    per_client: tuple[int, ...] = option(
        (), "with assign: list, each client's position in 'architectures'", ge=0
    )
    initial: Literal["common", "own"] = option(
        "common", "initial weights: one draw per architecture, or one per client"
    )

    @classmethod
    def expand(cls, value: Any) -> Any:
        """``models: mlp`` and ``models: [mlp, cnn]``."""
        if isinstance(value, str):
            value = [value]
        return {"architectures": value} if isinstance(value, list | tuple) else value

    def validate(self) -> None:
        if not self.architectures:
            raise ConfigError("at least one is needed", "architectures")
        if self.per_client and self.assign != "list":
            raise ConfigError("given, but assign is not 'list'", "per_client")
        if self.per_client and max(self.per_client) >= len(self.architectures):
            raise ConfigError(
                f"position {max(self.per_client)} of {len(self.architectures)} architectures",
                "per_client",
            )

    def deal(self, train_sizes: np.ndarray, seed: int) -> list[Architecture]:
        """Each client's architecture."""
        if self.assign == "list":
            if len(self.per_client) != len(train_sizes):
                raise ConfigError(
                    f"{len(self.per_client)} entries for {len(train_sizes)} clients",
                    "models.per_client",
                )
            positions = np.array(self.per_client, dtype=int)
        else:
            # The paper: "the probability of a larger model … is proportional to the client's
            # dataset size". With two architectures that is this rule to the letter; with more,
            # the expected position grows in proportion.
            positions = numpy_stream(seed, "architectures").binomial(
                len(self.architectures) - 1, train_sizes / train_sizes.max()
            )
        return [self.architectures[position] for position in positions]


def build_module(architecture: Architecture, shape: Shape, classes: int) -> nn.Module:
    """The module, after checking that it takes the data and has an output per class."""
    with torch_stream(0, "template"):
        module = architecture.build(shape, classes)
    module.eval()
    label = architecture.label()
    try:
        with torch.no_grad():
            width = module(torch.zeros(2, *shape)).shape
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"'{label}' cannot take {shape} inputs: {reason}", "models") from None
    if width != (2, classes):
        raise ConfigError(
            f"'{label}' gives outputs of shape {tuple(width[1:])} for one sample, "
            f"but the data has {classes} classes: it must give ({classes},)",
            "models",
        )
    return module


def initial_weights(
    architecture: Architecture,
    shape: Shape,
    classes: int,
    seed: int,
    client: int = -1,
    number: int = 0,
) -> Weights:
    """The architecture's initial weights: common to all clients, or one client's own."""
    with torch_stream(seed, f"initial/{architecture.label()}/{number}", client):
        module = architecture.build(shape, classes)
    return Weights(dict(module.named_parameters()), dict(module.named_buffers())).clone()
