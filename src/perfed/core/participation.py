"""Participation: which clients are there in a round, and how far each of them gets.

Real clients come and go. They sleep, join late, lose their connection, or are slow. All of it is
drawn from streams named by (seed, purpose, client, round). So every method meets the same absences,
and a client that is away changes no random number of another.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from perfed.core.schema import Options, option
from perfed.core.streams import numpy_stream


@dataclass(frozen=True)
class Participation(Options):
    """Everybody is there in every round, unless told otherwise."""

    shifts: int = option(
        1, "number of groups of clients that are there one after another; 1: all at once", ge=1
    )
    shift_rounds: int = option(1, "rounds that a shift lasts", ge=1)
    late: float = option(0.0, "share of the clients that join late", ge=0, lt=1)
    late_rounds: int = option(
        10, "each of them joins after 1 to this many rounds, all equally likely", ge=1
    )
    dropout: float = option(
        0.0,
        "probability that a selected client drops out: it gets the message, and then neither "
        "trains nor answers in this round",
        ge=0,
        lt=1,
    )
    stragglers: float = option(
        0.0, "probability that a client is slow in a round, and makes fewer steps", ge=0, le=1
    )
    straggler_steps: float = option(
        0.5, "share of its steps that a slow client makes, at least one step", gt=0, le=1
    )

    def there(self, clients: int, seed: int, round: int) -> np.ndarray:
        """Of all clients, those that can be selected. Before the first round, where a method has
        an initial set, they are all that do not join late: at least one."""
        if not self.late and self.shifts == 1:
            return _everybody(clients)
        present = np.ones(clients, dtype=bool)
        if self.late:
            present &= _joins(clients, seed, self.late, self.late_rounds) <= max(round, 0)
        if self.shifts > 1 and round >= 0:
            now = round // self.shift_rounds % self.shifts
            present &= _shifts(clients, seed, self.shifts) == now
        return np.flatnonzero(present)

    def dropped(self, clients: Iterable[int], seed: int, round: int) -> list[int]:
        """Of the selected clients, those that drop out."""
        return self._drawn(self.dropout, "dropout", clients, seed, round)

    def slow(self, clients: Iterable[int], seed: int, round: int) -> list[int]:
        return self._drawn(self.stragglers, "stragglers", clients, seed, round)

    def steps(self, steps: int, seed: int, client: int, round: int) -> int:
        """How many of its training steps a client makes in a round."""
        if not self.slow([client], seed, round):
            return steps
        return max(1, int(self.straggler_steps * steps))

    def _drawn(
        self, chance: float, purpose: str, clients: Iterable[int], seed: int, round: int
    ) -> list[int]:
        if not chance:
            return []
        return [c for c in clients if numpy_stream(seed, purpose, c, round).random() < chance]


@functools.lru_cache(maxsize=8)
def _everybody(clients: int) -> np.ndarray:
    return np.arange(clients)


@functools.lru_cache(maxsize=8)
def _joins(clients: int, seed: int, share: float, rounds: int) -> np.ndarray:
    """The first round of each client."""
    joins = numpy_stream(seed, "late-rounds").integers(1, rounds + 1, size=clients)
    late = numpy_stream(seed, "late").permutation(clients)[: int(share * clients)]
    joins[np.setdiff1d(np.arange(clients), late)] = 0
    return joins


@functools.lru_cache(maxsize=8)
def _shifts(clients: int, seed: int, shifts: int) -> np.ndarray:
    """The shift of each client; all are of one size, or differ by one client."""
    numbers: np.ndarray = numpy_stream(seed, "shifts").permutation(clients) % shifts
    return numbers
