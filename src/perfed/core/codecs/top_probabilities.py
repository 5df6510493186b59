"""The k most probable classes of a row, with their probabilities in few bits.

What is left is shared evenly by the other classes. So with m = 2ᵇ − 1 no probability is off by more
than 1/m, or, where that is more, by the smallest of the k largest, which is at most 1/k.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.core.codecs.bits import nearest_levels
from perfed.core.codecs.probabilities import (
    LEVELS,
    check_classes,
    check_room,
    class_type,
    rows_of_probabilities,
)
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage, stages


@stages.register("top-probabilities")
@dataclass(frozen=True)
class TopProbabilities(Stage):
    """Of each row of probabilities, sends the largest in few bits; the other classes share the rest
    evenly. None is off by more than the smallest that is sent, or 1 / (2ᵇ − 1) with b bits."""

    number: int = option(2, "how many of a row are sent", ge=1, symbol="k")
    bits: int = option(8, "of a probability", ge=1, le=8)

    directions = ("up", "down")
    exact = False
    codes = True

    @property
    def total(self) -> int:
        """m."""
        return (1 << self.bits) - 1

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays = dict(message.arrays)
        for path, classes in rows_of_probabilities(message, at).items():
            values = arrays[path]
            if not values.is_floating_point() or values.shape[-1] != classes:
                continue
            rows, count = values.reshape(-1, classes), self._count(classes)
            order = rows.argsort(dim=1, descending=True, stable=True)[:, :count]
            largest = rows.gather(1, order).double()
            rest = (rows.double().sum(1, keepdim=True) - largest.sum(1, keepdim=True)).clamp(min=0)
            levels = nearest_levels(torch.cat([largest, rest], 1), self.total)[:, :count]
            shape = (*values.shape[:-1], count)
            arrays[path] = order.to(class_type(classes)).view(shape)
            arrays[path + LEVELS] = levels.to(torch.uint8).view(shape)
        return Message.from_arrays(arrays), state

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays = {path: t for path, t in message.arrays.items() if not path.endswith(LEVELS)}
        check_room(Message.from_arrays(arrays), at)
        for path, classes in rows_of_probabilities(Message.from_arrays(arrays), at).items():
            if path + LEVELS not in message.arrays:  # another stage has coded it
                continue
            arrays[path] = self._decoded(arrays[path], message.arrays[path + LEVELS], classes)
        return Message.from_arrays(arrays), state

    def _count(self, classes: int) -> int:
        return min(self.number, classes)

    def _decoded(self, numbers: Tensor, levels: Tensor, classes: int) -> Tensor:
        count = self._count(classes)
        check_classes(numbers, classes, count)
        if levels.shape != numbers.shape or levels.dtype != torch.uint8:
            raise Refused(f"{tuple(levels.shape)} {levels.dtype}: must be a level for each class")
        which = numbers.reshape(-1, count).long()
        said = levels.reshape(-1, count).double() / self.total
        if bool((which.sort(1).values.diff(dim=1) == 0).any()):
            raise Refused("a class is there twice in a row")
        rest = 1 - said.sum(1, keepdim=True)
        if bool((rest < -1e-9).any()):
            raise Refused("probabilities of a row sum to more than 1")
        rows = (rest.clamp(min=0) / max(1, classes - count)).repeat(1, classes)
        rows.scatter_(1, which, said)
        return rows.to(torch.get_default_dtype()).view(*numbers.shape[:-1], classes)
