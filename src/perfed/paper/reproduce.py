"""A result of the paper as files: numbers (JSON), tables (Markdown, LaTeX), a figure (PNG, PDF)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perfed.core import layout
from perfed.core.layout import Table
from perfed.core.tensorfile import write_atomically
from perfed.paper import costs, figure1, figure2, theorem1, theorem2

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Reproduction:
    """How a result is made, and shown."""

    make: Callable[[bool], Any]
    """Quick or not."""
    tables: Callable[[Any], Sequence[Table]]
    plot: Callable[[Any], Figure]


SINGLE = {
    "costs": Reproduction(costs.costs, costs.tables, costs.plot),
    "figure1": Reproduction(figure1.figure1, figure1.tables, figure1.plot),
    "figure2": Reproduction(figure2.figure2, figure2.tables, figure2.plot),
    "theorem1": Reproduction(theorem1.theorem1, theorem1.tables, theorem1.plot),
    "theorem2": Reproduction(theorem2.theorem2, theorem2.tables, theorem2.plot),
}
STUDIES: dict[str, Literal[1, 2]] = {"table1": 1, "table2": 2}


def write(
    folder: Path,
    name: str,
    result: Any,
    tables: Sequence[Table],
    figures: Mapping[str, Figure] | None = None,
) -> list[Path]:
    """Every form of a result, with figures by name; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "json": json.dumps(result, allow_nan=False),
        "md": layout.markdown(tables),
        "tex": layout.latex(tables),
    }
    paths = []
    for ending, text in texts.items():
        paths.append(folder / f"{name}.{ending}")
        write_atomically(paths[-1], f"{text}\n".encode())
    for figure_name, figure in (figures or {}).items():
        for ending in ("png", "pdf"):
            paths.append(folder / f"{figure_name}.{ending}")
            figure.savefig(paths[-1], dpi=130)
    return paths
