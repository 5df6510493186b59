"""Which arrays of a message are rows of probabilities, and over how many classes."""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.core.admission import most_bytes
from perfed.core.codecs.number_bits import RANGE
from perfed.core.codecs.top_changes import GAPS
from perfed.core.declaration import Array, LogProbabilities, Probabilities, Range, array_of
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.wire import At

LEVELS = "|levels"
CODES_OF_ARRAYS = (LEVELS, RANGE, GAPS)
"""What codecs leave beside an array that they have made another one of."""


def rows_of_probabilities(
    message: Message, at: At, kind: type[Range] = Probabilities
) -> dict[str, int]:
    """By their flat names, with the number of classes; or of their logarithms. Not those that a
    stage before this one has coded: both ends see by what is beside them that they are no rows."""
    found = {path: array_of(path, at.declared) for path in message.arrays}
    return {
        path: classes_in(entry, at)
        for path, entry in found.items()
        if entry is not None
        and isinstance(entry.range, kind)
        and entry.shape
        and not any(path + code in message.arrays for code in CODES_OF_ARRAYS)
    }


def classes_in(entry: Array, at: At) -> int:
    """In a row. A receiver knows it by itself: what somebody says could be any number."""
    if at.known is None:
        raise Refused("the number of classes is not known at this end")
    last = entry.shape[-1]
    found = at.known.sizes.get(last) if isinstance(last, str) else last
    if not isinstance(found, int):
        raise Refused(f"how many probabilities a row has is not known: {last}")
    return found


def check_room(message: Message, at: At) -> None:
    """That all rows, once every class has its number, are no more than a message can be. A code of
    a row may be a byte, and a thousand classes take thousands."""
    most, itemsize = most_bytes(at.declared, at.known), torch.get_default_dtype().itemsize
    size = 0
    for kind in (Probabilities, LogProbabilities):
        for path, classes in rows_of_probabilities(message, at, kind).items():
            code = message.arrays[path]
            columns = code.shape[-1] if code.ndim else 1
            size += code.numel() // max(1, columns) * classes * itemsize
    if size > most:
        raise Refused(f"stands for {size} bytes: must be at most {most}")


def class_type(classes: int) -> torch.dtype:
    """Of a class's number."""
    return torch.uint8 if classes <= 256 else torch.int16 if classes <= 2**15 else torch.int32


def check_classes(numbers: Tensor, classes: int, columns: int) -> None:
    """That numbers of classes came, so many in a row."""
    must = class_type(classes)
    if numbers.dtype != must or numbers.ndim < 1 or numbers.shape[-1] != columns:
        raise Refused(f"{tuple(numbers.shape)} {numbers.dtype}: must be {columns} classes a row")
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < classes:
        raise Refused(f"a class that is not below {classes}")
