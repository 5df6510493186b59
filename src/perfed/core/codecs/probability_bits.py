"""Rows of probabilities in few bits: whole numbers that sum to m = 2ᵇ − 1.

A row becomes the *levels* nearest to m times itself (``nearest_levels`` in :mod:`.bits`). No
probability is off by 1/m or more: 0.004 with 8 bits, 0.07 with 4, a third with 2. One bit is the
most probable class alone, a hard label.

Where the *logarithms* of probabilities are declared, up to a constant in each row, their
probabilities are coded. A level of zero has no logarithm: together these classes get half a unit.
So the probabilities behind are off by at most 1.5/m.

Levels are m units given to classes. Where m is smaller than the number of classes N, a row is sent
as the classes of its units, m numbers, the class with most units first; else as its N levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.core.codecs.bits import levels_of, nearest_levels, units_of
from perfed.core.codecs.probabilities import (
    check_classes,
    check_room,
    class_type,
    rows_of_probabilities,
)
from perfed.core.declaration import LogProbabilities
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage, stages

UNSAID = 0.5  # of a unit, for all classes of a row that got none


@stages.register("probability-bits")
@dataclass(frozen=True)
class ProbabilityBits(Stage):
    """Probabilities in few bits each, or as hard labels. With b bits none is off by more than
    1 / (2ᵇ − 1): 0.004 with 8, 0.07 with 4, a third with 2."""

    bits: int = option(8, "of a probability; 1: a hard label, the class alone", ge=1, le=8)
    log_bits: int | None = option(
        None, "of one whose logarithm is declared; as many as the others, if not given", ge=1, le=8
    )

    directions = ("up", "down")
    exact = False
    codes = True

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays = dict(message.arrays)
        for path, classes in rows_of_probabilities(message, at, LogProbabilities).items():
            if arrays[path].is_floating_point():
                arrays[path] = arrays[path].double().softmax(-1)
            arrays[path] = _coded(arrays[path], classes, self._units_of_logarithms)
        for path, classes in rows_of_probabilities(message, at).items():
            arrays[path] = _coded(arrays[path], classes, _units(self.bits))
        return Message.from_arrays(arrays), state

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        check_room(message, at)
        arrays, units = dict(message.arrays), _units(self.bits)
        for path, classes in rows_of_probabilities(message, at).items():
            arrays[path] = _levels(arrays[path], classes, units) / units
        for path, classes in rows_of_probabilities(message, at, LogProbabilities).items():
            arrays[path] = _logarithms(_levels(arrays[path], classes, self._units_of_logarithms))
        return Message.from_arrays(arrays), state

    @property
    def _units_of_logarithms(self) -> int:
        return _units(self.log_bits or self.bits)


def _units(bits: int) -> int:
    """m."""
    return (1 << bits) - 1


def _coded(values: Tensor, classes: int, units: int) -> Tensor:
    if not values.is_floating_point() or values.shape[-1] != classes:
        return values
    levels = nearest_levels(values.reshape(-1, classes), units)
    if units < classes:
        code = units_of(levels, units).to(class_type(classes))
    else:
        code = levels.to(torch.uint8)
    return code.view(*values.shape[:-1], -1)


def _levels(code: Tensor, classes: int, units: int) -> Tensor:
    if units < classes:
        check_classes(code, classes, units)
        levels = levels_of(code.reshape(-1, units), classes)
    else:
        if code.dtype != torch.uint8 or code.ndim < 1 or code.shape[-1] != classes:
            raise Refused(f"{tuple(code.shape)} {code.dtype}: must be {classes} levels a row")
        levels = code.reshape(-1, classes).long()
        if not bool((levels.sum(1) == units).all()):
            raise Refused(f"levels of a row must sum to {units}")
    return levels.to(torch.get_default_dtype()).view(*code.shape[:-1], classes)


def _logarithms(levels: Tensor) -> Tensor:
    """Of the probabilities that levels stand for; every row sums to zero."""
    empty = (levels == 0).to(levels)
    filled = levels + empty * UNSAID / empty.sum(-1, keepdim=True).clamp(min=1)
    logarithms: Tensor = filled.log()
    return logarithms - logarithms.mean(-1, keepdim=True)
