"""A number for each method of a figure, which is its colour: the same on every page."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, count

USUAL = (
    *("majority", "local", "fedavg", "hypcluster"),
    *("perfed-ckt", "fedmd", "perfed-kin", "ditto"),
)
"""Methods that are shown most, each at its number."""
OTHERS = (4, 5, 6, 2, 3, 7, 1, 0)
"""Numbers of the other methods, as far as they are free: blue first, grey last."""


def method_numbers(labels: Iterable[str]) -> dict[str, int]:
    """By label: a method's name, and what tells it from its variants. Of two variants of a usual
    method the first has the usual number."""
    methods, usual = list(dict.fromkeys(labels)), dict[int, str]()
    for label in methods:
        name = label.partition(" ")[0].partition("(")[0]
        if name in USUAL:
            usual.setdefault(USUAL.index(name), label)
    free = (n for n in chain(OTHERS, count(len(OTHERS))) if n not in usual)
    numbers = {label: number for number, label in usual.items()}
    return {label: numbers[label] if label in numbers else next(free) for label in methods}
