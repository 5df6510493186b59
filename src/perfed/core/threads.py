"""How many threads torch may use on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
