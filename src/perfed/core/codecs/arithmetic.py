"""Yes or no, in as many bits as the answer is surprising: an adaptive binary arithmetic coder.

Each answer is asked in a *context*, any key that both ends know. How often the answer was yes in
that context before says how likely it is now. Only whole numbers are computed with, so that two
machines never differ.

The interval of 32 bits is divided in proportion to the counts, and the answer's part is kept.
Whatever is settled leaves as a byte; a carry into bytes that have left is added there.
"""

from __future__ import annotations

from collections.abc import Hashable

from perfed.core.errors import Refused

BITS = 32
WHOLE = 1 << BITS
SMALLEST = 1 << (BITS - 8)  # of an interval: then a byte is settled
START, STEP = 1, 3  # a count, before and for each answer: a third of an answer is assumed of both
MOST = 1 << 14  # of both counts together, far below SMALLEST; then they are halved


class Counts:
    """How often the answers were no and yes, by context."""

    def __init__(self) -> None:
        self._of: dict[Hashable, list[int]] = {}

    def of(self, context: Hashable) -> list[int]:
        found = self._of.get(context)
        if found is None:
            found = self._of[context] = [START, START]
        return found


def _counted(counts: list[int], answer: bool) -> None:
    counts[answer] += STEP
    if counts[0] + counts[1] > MOST:
        counts[:] = [counts[0] // 2 + 1, counts[1] // 2 + 1]


class Writer:
    def __init__(self) -> None:
        self._counts, self._low, self._size, self._out = Counts(), 0, WHOLE, bytearray()

    def answer(self, context: Hashable, answer: bool) -> bool:
        """Write one; gives it back, as :class:`Reader` does."""
        counts = self._counts.of(context)
        part = self._size * counts[0] // (counts[0] + counts[1])
        if answer:
            self._low, self._size = self._low + part, self._size - part
        else:
            self._size = part
        while self._size < SMALLEST:
            self._leave()
            self._size <<= 8
        _counted(counts, answer)
        return answer

    def bytes(self) -> bytes:
        """All that was written, with the shortest end: zeros at the end are not written."""
        for kept in range(BITS, -1, -8):
            end = -(-self._low >> kept) << kept  # rounded up
            if end < self._low + self._size:
                self._low = end
                break
        for _ in range(BITS // 8):
            self._leave()
        return bytes(self._out).rstrip(b"\0")

    def _leave(self) -> None:
        """The first byte of the interval's lower end."""
        if self._low >= WHOLE:
            place = len(self._out) - 1
            while self._out[place] == 255:
                self._out[place] = 0
                place -= 1
            self._out[place] += 1
            self._low -= WHOLE
        self._out.append(self._low >> (BITS - 8))
        self._low = (self._low << 8) % WHOLE


class Reader:
    """Of what a stranger may have written: any bytes are some answers."""

    def __init__(self, data: bytes) -> None:
        self._counts, self._size, self._data = Counts(), WHOLE, data
        self._next = BITS // 8
        self._place = int.from_bytes(data[: self._next].ljust(self._next, b"\0"), "big")

    def answer(self, context: Hashable, answer: bool = False) -> bool:
        """The next one, whatever is given."""
        counts = self._counts.of(context)
        part = self._size * counts[0] // (counts[0] + counts[1])
        found = self._place >= part
        if found:
            self._place, self._size = self._place - part, self._size - part
        else:
            self._size = part
        while self._size < SMALLEST:
            byte = self._data[self._next] if self._next < len(self._data) else 0
            self._place, self._size = self._place << 8 | byte, self._size << 8
            self._next += 1
        _counted(counts, found)
        return found

    def end(self) -> None:
        """Raises Refused where not all bytes were read."""
        if self._next < len(self._data):
            raise Refused(f"{len(self._data) - self._next} bytes more than it stands for")
