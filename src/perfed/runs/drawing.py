"""Who draws figures and pages of runs: ``report``, a room above this one, says so itself.

``runs`` imports nothing from ``report``. :mod:`perfed` tells each of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfed.runs.result import Result


@dataclass(frozen=True)
class Drawing:
    """What results can be drawn as. Each function writes a file and returns its path."""

    plot: Callable[[Sequence[Result], Path], Path]
    """Accuracy by round and by communication, as a PNG or PDF file."""
    page: Callable[[Sequence[Path], Path], Path]
    """All there is to see of run directories, as one HTML file."""


_known: list[Drawing] = []


def draw_with(drawing: Drawing) -> None:
    """From now on, results are drawn by these functions."""
    _known[:] = [drawing]


def drawing() -> Drawing:
    return _known[0]
