"""Rows of levels, written in terms of the rows that were there before.

A row is a few units given to classes (:mod:`.probability_bits`). Class by class it is asked whether
the row has one unit more of it, until no unit is left. Classes with most units in the earlier row
come first, then those that all earlier rows have most of. How many units the class had before and
how many are left is the context, and the class itself where it had none: so what changes little
takes little, and nothing need be said of what does not change.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.core.codecs.arithmetic import Reader, Writer
from perfed.core.codecs.bits import levels_of, units_of
from perfed.core.codecs.probabilities import class_type

MOST_UNITS = 31
"""Of a row: each is a question."""
FEW = 3  # units that are left: more are alike, for a class that had some


def as_levels(code: Tensor, classes: int) -> Tensor | None:
    """The levels, (rows, N), that rows of probabilities in few bits stand for; None where these are
    not such rows, or of too many units, or where :func:`as_code` would not give them back."""
    columns = code.shape[-1]
    if not code.numel() or columns > classes or code.dtype != _type(columns, classes):
        return None
    rows = code.reshape(-1, columns).long()
    if not 0 <= int(rows.min()) <= int(rows.max()) < max(classes, MOST_UNITS + 1):
        return None
    levels = levels_of(rows, classes) if columns < classes else rows
    units = int(levels[0].sum())
    if not 0 < units <= MOST_UNITS or bool((levels.sum(1) != units).any()):
        return None
    return levels if torch.equal(as_code(levels, columns), code.reshape(-1, columns)) else None


def as_code(levels: Tensor, columns: int) -> Tensor:
    """Rows of so many columns: the classes of units if these are fewer than there are classes."""
    classes = levels.shape[1]
    rows = units_of(levels, columns) if columns < classes else levels
    return rows.to(_type(columns, classes))


def _type(columns: int, classes: int) -> torch.dtype:
    return class_type(classes) if columns < classes else torch.uint8


def written(levels: Tensor, before: Tensor) -> bytes:
    """Rows, (rows, N), that all sum to the same, in terms of rows of the same shape; these may be
    all zero."""
    coder = Writer()
    for row, earlier, order in zip(levels.tolist(), *_earlier(before), strict=True):
        _row(coder, earlier, order, sum(row), row)
    return coder.bytes()


def read(data: bytes, before: Tensor, total: int) -> Tensor:
    """What was written in terms of the same earlier rows; any bytes are some rows."""
    coder = Reader(data)
    nothing = [0] * before.shape[1]
    rows = [_row(coder, *one, total, nothing) for one in zip(*_earlier(before), strict=True)]
    coder.end()
    return torch.tensor(rows, dtype=torch.long).view(before.shape)


def _row(
    coder: Writer | Reader, before: list[int], order: list[int], total: int, row: list[int]
) -> list[int]:
    """Both ends ask the same; who reads does not look at ``row``."""
    found, left = [0] * len(before), total
    for label in order[:-1]:
        if not left:
            return found
        was, level = before[label], 0
        about = (was, min(left, FEW)) if was else (-1 - label, left)
        while level < left and coder.answer((*about, level), row[label] > level):
            level += 1
        found[label], left = level, left - level
    found[order[-1]] = left
    return found


def _earlier(before: Tensor) -> tuple[list[list[int]], list[list[int]]]:
    """Earlier rows, and the order in which classes are asked for."""
    usual = before.sum(0) + 1
    order = (before * usual.sum() + usual).argsort(dim=1, descending=True, stable=True)
    return before.tolist(), order.tolist()
