"""Checksums: what a run has written is found again as it was, or a line says that it is not.

A JSON file carries the checksum of the rest of it. A log has one too, for its beginning: in the
manifest of the newest checkpoint, and at the end of the run in ``checksums.json``. That file also
holds the settings as they were when the run began, so that a changed one can be named. A model's
checksum is in its own file (:func:`perfed.core.tensorfile.sealed`).

They find damage and honest mistakes. Who means to deceive can write them anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from perfed.core.errors import RunError

FILE = "checksums.json"
KEY = "checksum"
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""What reading raises where a file has another shape than perfed writes."""
PIECE = 2**20  # bytes that are in memory at once


def checksum(values: Mapping[str, Any]) -> str:
    """Of the content: how it is written down does not matter."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(values, allow_nan=False))  # as it will be read
    return {**plain, KEY: checksum(plain)}


def parsed(text: bytes) -> dict[str, Any]:
    """One JSON object; ValueError where it is something else."""
    try:
        values = json.loads(text.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its values are too deep inside each other") from None
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}, not keys and values")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def checked(values: dict[str, Any], required: bool) -> dict[str, Any]:
    """``values`` without their checksum; ValueError where it is wrong, or missing though it is
    ``required``."""
    rest = {key: value for key, value in values.items() if key != KEY}
    if KEY not in values:
        if required:
            raise ValueError("it has lost its checksum")
    elif values[KEY] != checksum(rest):
        raise ValueError("its checksum is not that of its content")
    return rest


class LogSum:
    """The checksum of a log that grows: each line is read once."""

    def __init__(self) -> None:
        self.size = 0
        self._sum = hashlib.sha256()

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self._sum.update(data)

    def value(self) -> str:
        return self._sum.hexdigest()

    @classmethod
    def of(cls, path: Path, size: int) -> LogSum:
        """Of the first ``size`` bytes of a file, or of all where it has fewer."""
        found = cls()
        with open(path, "rb") as file:
            while piece := file.read(min(PIECE, size - found.size)):
                found.add(piece)
        return found


def log_lines(path: Path, data: bytes, whole: bool = False) -> list[dict[str, Any]]:
    """The lines of a log in the order of their rounds. The last one may be in the making, unless
    they must be ``whole``."""
    *texts, rest = data.split(b"\n")
    if whole and rest:
        texts.append(rest)
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = parsed(text)
            if type(line.get("round")) is not int:
                raise ValueError("it names no round")
            if lines and line["round"] <= lines[-1]["round"]:
                raise ValueError(f"round {line['round']} comes after {lines[-1]['round']}")
        except ValueError as error:
            raise RunError(f"{path}, line {number}, is corrupt: {error}") from None
        lines.append(line)
    return lines
