"""Numbers in few bits: weights, logits, and what else is not declared as probabilities.

Each array becomes whole numbers 0 … 2ᵇ − 1 between its smallest and its largest number, which are
sent along. No number is off by more than half a step, (largest − smallest) / (2ᵇ − 1) / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.core.declaration import Probabilities, array_of
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage, stages

RANGE = "|range"
FEWEST = 8
"""Numbers of an array that is coded: a shorter one would not become smaller."""


@stages.register("number-bits")
@dataclass(frozen=True)
class NumberBits(Stage):
    """Weights and other numbers that are not probabilities, in few bits each. With b bits none is
    off by more than half a step, of which there are 2ᵇ − 1 from an array's smallest to its
    largest number."""

    bits: int = option(8, "of a number", ge=1, le=8)

    directions = ("up", "down")
    exact = False
    codes = True

    @property
    def steps(self) -> int:
        return (1 << self.bits) - 1

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays: dict[str, Tensor] = {}
        for path, values in message.arrays.items():
            arrays[path] = values
            if values.is_floating_point() and values.numel() >= FEWEST and not _said(path, at):
                low, high = (end.double() for end in values.aminmax())
                step = (high - low) / self.steps
                place = (values.double() - low) / step.clamp(min=torch.finfo(torch.double).tiny)
                arrays[path] = place.round().clamp(0, self.steps).to(torch.uint8)
                arrays[path + RANGE] = torch.stack([low, step]).to(values.dtype)
        return Message.from_arrays(arrays), state

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays = {path: t for path, t in message.arrays.items() if not path.endswith(RANGE)}
        for path, ends in message.arrays.items():
            if path.endswith(RANGE):
                name = path.removesuffix(RANGE)
                arrays[name] = self._decoded(arrays[name], ends)
        return Message.from_arrays(arrays), state

    def _decoded(self, levels: Tensor, ends: Tensor) -> Tensor:
        if ends.shape != (2,) or not ends.is_floating_point():
            raise Refused("the range of an array must be two numbers")
        if levels.dtype != torch.uint8:
            raise Refused(f"levels are {levels.dtype}, must be torch.uint8")
        if levels.numel() and int(levels.max()) > self.steps:
            raise Refused(f"a level above {self.steps}")
        low, step = ends.double()
        values: Tensor = low + levels.double() * step
        return values.to(ends.dtype)


def _said(path: str, at: At) -> bool:
    """Whether these are probabilities: they have codecs of their own."""
    entry = array_of(path, at.declared)
    return entry is not None and isinstance(entry.range, Probabilities)
