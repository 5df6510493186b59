"""The errors a user can cause and mend. Each is one line: what is wrong, where, what is right."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

LONGEST_SHOWN = 200  # characters of a user's value in a message
LONGEST_REASON = 500  # characters of why something was refused


class PerfedError(Exception):
    """Something the user can mend. The command line prints it in one line and exits with 2."""


class ConfigError(PerfedError):
    """A configuration that does not describe an experiment. ``where`` is the dotted key."""

    def __init__(self, message: str, where: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        self.where = where

    def inside(self, outer: str) -> ConfigError:
        """The same error, seen from one level further out."""
        joint = "." if self.where and not self.where.startswith("[") else ""
        return ConfigError(self.message, f"{outer}{joint}{self.where}")


class RunError(PerfedError):
    """A run directory that cannot be created, read or continued."""


class DataError(PerfedError):
    """Data that cannot be fetched, read or trusted."""


class Diverged(PerfedError):
    """A model became infinite or not a number; going on would only produce noise."""


class Pruned(PerfedError):
    """A callback's ``on_round`` raises it: the run is not worth its further rounds."""


class Refused(PerfedError):
    """A message, a task or an answer that must not be used; the reason is told to who sent it.

    Another machine has a part in most reasons: names that it chose, or all of the text. Every log
    gets them from here.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(one_line(reason))


def one_line(text: str) -> str:
    """What another machine had a part in, for a log: short, and without line breaks, escape codes,
    invisible or turned characters and halves of characters."""
    return printable(text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]} …")


def printable(text: str) -> str:
    """Without what a terminal would obey. A file may hold it, too, in a word or a column's name."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'steps'? (known: …)"`` for an unknown ``word``."""
    names = sorted(known)
    short = [name for name in names if "".join(p[:1] for p in name.split("_")) == word.lower()]
    close = short or get_close_matches(cut(word), names, n=1, cutoff=0.5)  # lr: learning_rate
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return f"{hint} (known: {', '.join(names)})"


class _Shown(reprlib.Repr):
    """A repr that looks at no more of a value than it shows: a YAML file of 371 bytes can hold a
    value whose whole repr has no end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, LONGEST_SHOWN, LONGEST_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        bits = x.bit_length()  # Python refuses to write out thousands of digits
        return repr(x) if bits <= 4 * LONGEST_SHOWN else f"<a number of {bits} bits>"


_shown = _Shown()


def shown(value: Any) -> str:
    """A value as a message shows it: its repr, or the beginning where it is long."""
    return cut(_shown.repr(value))


def cut(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people write it: ``3×32×32``."""
    return "×".join(map(str, shape))
