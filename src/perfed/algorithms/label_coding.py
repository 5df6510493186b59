"""Class probabilities in few bits: the constrained quantiser of CFD, and what of it is sent.

In b bits a row of probabilities is N *levels*: whole numbers that sum to m = 2ᵇ − 1, nearest to m
times the row. With one bit that is a single 1 at the most probable class, and only the number of
this class is kept. What is kept of all rows is called *symbols*: |P|×1 or |P|×N.

Some of the rows are sent, as one array of bytes: a bit for each of the |P| rows says whether it is
there; then come the symbols of those that are, in as many bits each as they need. A code of 32
bits leaves probabilities as they are, and sends them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from perfed.core.codecs.bits import bytes_for, nearest_levels, packed, unpacked
from perfed.core.declaration import PROBABILITIES, Array, Known, Range

FULL = 32
MOST = 8  # bits of a level, where there are levels
SYMBOLS = torch.int16


@dataclass(frozen=True)
class LabelCode:
    """How rows of probabilities are kept and sent."""

    bits: int

    def array(self) -> Array:
        """What is declared: B stands for however many bytes there are."""
        full = Array(("P", "N"), PROBABILITIES)
        return full if self.bits == FULL else Array(("B",), Coded(self.bits))

    def symbols(self, probabilities: Tensor) -> Tensor:
        """What is kept of the rows of ``probabilities``, |P|×N."""
        if self.bits == FULL:
            return probabilities
        levels = nearest_levels(probabilities, 2**self.bits - 1)
        return (levels.argmax(1, keepdim=True) if self.bits == 1 else levels).to(SYMBOLS)

    def probabilities(self, symbols: Tensor, classes: int) -> Tensor:
        """The rows that symbols stand for."""
        if self.bits == FULL:
            return symbols
        levels = one_hot(symbols[:, 0].long(), classes) if self.bits == 1 else symbols
        rows: Tensor = levels.to(torch.get_default_dtype()) / (2**self.bits - 1)
        return rows

    def unknown(self, samples: int, classes: int, like: Tensor) -> Tensor:
        """Symbols of rows that have never been received, on the device of another tensor."""
        columns = 1 if self.bits == 1 else classes
        return torch.zeros(samples, columns, dtype=SYMBOLS, device=like.device)

    def encode(self, symbols: Tensor, which: Tensor, classes: int) -> Tensor:
        """What is sent of the rows that ``which`` names (|P| truths)."""
        if self.bits == FULL:
            return symbols
        return self._joined(which, symbols[which], classes)

    def decode(self, data: Tensor, before: Tensor, classes: int) -> Tensor:
        """The symbols, with those in ``data`` in their places and all others as before."""
        if self.bits == FULL:
            return data
        which, rows = self._parts(data, before.shape[0], before.shape[1], classes)
        symbols = before.clone()
        symbols[which] = rows
        return symbols

    def can_decode(self, data: Tensor, samples: int, classes: int) -> bool:
        """Whether the bytes are what :meth:`encode` could have made."""
        columns, width = 1 if self.bits == 1 else classes, self._width(classes)
        marks = bytes_for(samples, 1)
        if len(data) < marks:
            return False
        count = int(unpacked(data[:marks], 1, samples).sum())
        if len(data) != marks + bytes_for(count * columns, width):
            return False
        which, rows = self._parts(data, samples, columns, classes)
        right = rows < classes if self.bits == 1 else rows.sum(1) == 2**self.bits - 1
        return bool(right.all()) and torch.equal(self._joined(which, rows, classes), data)

    def _joined(self, which: Tensor, rows: Tensor, classes: int) -> Tensor:
        return torch.cat([packed(which, 1), packed(rows.flatten(), self._width(classes))])

    def _parts(
        self, data: Tensor, samples: int, columns: int, classes: int
    ) -> tuple[Tensor, Tensor]:
        """Which rows are there, and their symbols: what :meth:`_joined` was given."""
        marks = bytes_for(samples, 1)
        which = unpacked(data[:marks], 1, samples).bool()
        count = int(which.sum()) * columns
        rows = unpacked(data[marks:], self._width(classes), count)
        return which, rows.view(-1, columns).to(SYMBOLS)

    def _width(self, classes: int) -> int:
        """Bits of one symbol."""
        return max(1, (classes - 1).bit_length()) if self.bits == 1 else self.bits


@dataclass(frozen=True)
class Coded(Range):
    """Bytes that a code can decode: nothing else is admitted, so that decoding cannot fail."""

    bits: int
    dtype = torch.uint8

    def words(self) -> str:
        return f"bytes of coded labels, {self.bits} bit{'s' * (self.bits > 1)} each"

    def holds(self, values: Tensor, known: Known) -> Tensor:
        right = LabelCode(self.bits).can_decode(values, known.sizes["P"], known.sizes["N"])
        return torch.tensor(right, device=values.device)
