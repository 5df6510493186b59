"""Run a notebook without magics top to bottom, and keep what its cells show.

    python -m tests.notebook examples/tour.ipynb    runs it here and writes its outputs into it

The usual runner starts a kernel in a process of its own, with a dozen packages; this one needs
nothing but nbformat and matplotlib, and shows what a cell prints, its last value and its figures.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import sys
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
from nbformat.v4 import new_output

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def execute(notebook: Any) -> None:
    """Run all cells in one namespace; their outputs are replaced."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(cells, 1):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = run_cell(cell.source, namespace)
        cell.execution_count, cell.outputs = number, []
        if printed.getvalue():
            cell.outputs.append(new_output("stream", name="stdout", text=printed.getvalue()))
        if value is not None:
            shown = {"text/plain": repr(value)}
            if hasattr(value, "_repr_html_"):
                shown["text/html"] = value._repr_html_()
            cell.outputs.append(new_output("execute_result", shown, execution_count=number))
        cell.outputs += [new_output("display_data", figure) for figure in open_figures()]


def run_cell(source: str, namespace: dict[str, Any]) -> Any:
    """Its last value, where its last line has one."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    return None if source.rstrip().endswith(";") else value  # as Jupyter does


def open_figures() -> list[dict[str, str]]:
    found = []
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=90)
        data = base64.b64encode(picture.getvalue()).decode()
        found.append({"image/png": data, "text/plain": "<Figure>"})
    plt.close("all")
    return found


def main(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    with contextlib.redirect_stderr(sys.stdout):
        execute(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
