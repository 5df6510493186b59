"""Figures and pages, made from run directories.

Drawing needs matplotlib, so what draws is imported when something is drawn.
"""

from collections.abc import Sequence
from pathlib import Path

from perfed.runs.drawing import Drawing
from perfed.runs.result import Result


def _plot(results: Sequence[Result], path: Path) -> Path:
    from perfed.report.figures import plot_comparison

    return plot_comparison(results, path)


def _page(paths: Sequence[Path], path: Path) -> Path:
    from perfed.report.page import draw

    return draw(paths).write(path)


DRAWING = Drawing(_plot, _page)
