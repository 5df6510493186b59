"""Small changes of bytes: what a fault of a disk or a person with a text editor would do."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple

MOST_BYTES = 1 << 16
KINDS: tuple[Kind, ...] = ("byte", "write", "insert", "delete", "repeat", "cut", "swap", "number")
Kind = Literal["byte", "write", "insert", "delete", "repeat", "cut", "swap", "number"]


class Edit(NamedTuple):
    """A change. ``place`` and ``length`` are taken modulo what is there."""

    kind: Kind
    place: int
    length: int
    value: int


def edited(data: bytes, edits: Sequence[Edit], tokens: Sequence[bytes]) -> bytes:
    for edit in edits:
        data = _edited(data, edit, tokens)[:MOST_BYTES]
    return data


def _edited(data: bytes, edit: Edit, tokens: Sequence[bytes]) -> bytes:
    place = edit.place % (len(data) + 1)
    end = min(len(data), place + 1 + edit.length % 32)
    token = tokens[edit.value % len(tokens)] if tokens else bytes([edit.value % 256])
    match edit.kind:
        case "byte":
            return data[:place] + bytes([edit.value % 256]) + data[place + 1 :]
        case "write":
            return data[:place] + token + data[place + len(token) :]
        case "insert":
            return data[:place] + token + data[place:]
        case "delete":
            return data[:place] + data[end:]
        case "repeat":
            return data[:end] + data[place:end] * (1 + edit.value % 4) + data[end:]
        case "cut":
            return data[:place]
        case "swap":
            other = edit.value % (len(data) + 1)
            return data[:place] + data[other : other + end - place] + data[end:]
        case "number":
            return _with_other_number(data, place, token)


def _with_other_number(data: bytes, place: int, token: bytes) -> bytes:
    """The next run of digits becomes a token: structure stays, a value does not."""
    first = next((n for n in range(place, len(data)) if data[n : n + 1].isdigit()), len(data))
    last = first
    while data[last : last + 1].isdigit():
        last += 1
    return data[:first] + token + data[last:]


def random_edits(draw: random.Random) -> list[Edit]:
    large = 1 << 32
    return [
        Edit(
            draw.choice(KINDS), draw.randrange(large), draw.randrange(large), draw.randrange(large)
        )
        for _ in range(draw.choice((1, 1, 1, 2, 4)))
    ]
