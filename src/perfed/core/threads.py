"""How many threads torch may use on the CPU, and threads for what waits for a disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import torch

Item = TypeVar("Item")
Made = TypeVar("Made")
WRITERS = 8


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Small tensors gain nothing from more than one thread, and where other programs keep the
    cores busy, threads that wait for each other lose a factor of ten."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_threads(function: Callable[[Item], Made], items: Iterable[Item]) -> Iterator[Made]:
    """``map``, a few items at a time: no more of them are in memory at once."""
    remaining = iter(items)
    with ThreadPoolExecutor(WRITERS) as pool:
        while few := list(islice(remaining, WRITERS)):
            yield from pool.map(function, few)
