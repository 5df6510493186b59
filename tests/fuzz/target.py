"""What is fuzzed: valid inputs to begin with, and what must hold for any bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from perfed.core.errors import PerfedError

LONGEST_LINE = 2000


class Target(ABC):
    """One way in."""

    tokens: ClassVar[tuple[bytes, ...]] = ()
    """What a mutation may write: the words of the format, and odd values."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """To write in."""

    @abstractmethod
    def seeds(self) -> list[bytes]:
        """Inputs that are accepted."""

    @abstractmethod
    def read(self, data: bytes) -> None:
        """Read it. Raises PerfedError where it is refused, AssertionError where it is accepted and
        must not be; any other error is a fault too."""

    def accepts(self, data: bytes) -> bool:
        try:
            self.read(data)
        except PerfedError as error:
            text = str(error)
            assert "\n" not in text, f"more than one line: {text!r}"
            assert len(text) <= LONGEST_LINE, f"a line of {len(text)} characters"
            return False
        return True


ODD_NUMBERS = (
    *(b"-1", b"0", b"1", b"1.5", b"1e30", b"1e999", b"-1e-9", b"0x_", b"99999999999", b"true"),
    *(b"9223372036854775808", b"1" * 400, b"NaN", b"Infinity", b"null"),
)
ODD_JSON = (
    *ODD_NUMBERS,
    b'""',
    b"[]",
    b"{}",
    b"[[",
    b"{}}",
    b'"\\ud800"',
    b'{"a":',
    b"[1,2]",
    b",",
)
