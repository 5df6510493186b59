"""An 8-bit codec: each floating array as whole numbers 0 … 255 between its smallest and its largest
value, which are sent along. A quarter of the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage, stages

LEVELS = 255


@stages.register("eight-bit")
@dataclass(frozen=True)
class EightBit(Stage):
    rounding: Literal["nearest", "stochastic"] = option(
        "nearest", "to the nearest level, or to one of the two beside, so that the mean is right"
    )

    directions = ("up", "down")
    exact = False

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays: dict[str, Tensor] = {}
        for name, values in message.arrays.items():
            if not values.is_floating_point() or values.numel() < 3:
                arrays[f"exact/{name}"] = values
                continue
            low, high = (end.double() for end in values.aminmax())
            step = ((high - low) / LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
            place = (values.double() - low) / step
            if self.rounding == "stochastic":
                place = (
                    place + torch.from_numpy(at.random(name).random(place.shape)).to(place)
                ).floor()
            arrays[f"levels/{name}"] = place.round().clamp(0, LEVELS).to(torch.uint8)
            arrays[f"scale/{name}"] = torch.stack([low, step]).to(values.dtype)
        return Message.from_arrays(arrays), state

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays: dict[str, Tensor] = {}
        for name, values in message.arrays.items():
            kind, _, original = name.partition("/")
            if kind == "exact":
                arrays[original] = values
            elif kind == "levels":
                low, step = message.arrays[f"scale/{original}"].view(2)  # no more: it would spread
                arrays[original] = low + values.to(step.dtype) * step
        return Message.from_arrays(arrays), state
