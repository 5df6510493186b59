"""A table as plain text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What LaTeX takes for a command, and signs that its usual fonts lack.
_LATEX = str.maketrans(
    {c: rf"\{c}" for c in "%&#_$"}
    | {
        "<": "$<$",  # which the usual fonts print as a turned exclamation mark
        ">": "$>$",
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "^": r"\^{}",
        "~": r"\~{}",
        "…": r"\dots{}",
        "±": r"$\pm$",
        "−": r"$-$",
        "–": "--",
        "·": r"$\cdot$",
        "‖": r"$\|$",
        "∇": r"$\nabla$",
        "Φ": r"$\Phi$",
        "η": r"$\eta$",
        "λ": r"$\lambda$",
        "τ": r"$\tau$",
        "μ": r"$\mu$",
        "α": r"$\alpha$",
        "β": r"$\beta$",
        "ν": r"$\nu$",
        "σ": r"$\sigma$",
        "υ": r"$\upsilon$",
        "θ": r"$\theta$",
        "²": r"$^2$",
        "⁷": r"$^7$",
        "×": r"$\times$",
        "≤": r"$\le$",
        "≥": r"$\ge$",
        "→": r"$\to$",
        "ŵ": r"$\hat w$",
        "\u0304": "",  # the bar over s
    }
)


@dataclass(frozen=True)
class Table:
    """Cells as they are shown. The first ``names`` columns are words, the others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    names: int = 1
    bold: Collection[tuple[int, int]] = ()
    """Cells that stand out, by row and column; plain text does without."""

    def text(self) -> str:
        lines = [list(self.header), *map(list, self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        body = []
        for line in lines:
            cells = [
                cell.ljust(width) if column < self.names else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            body.append("  ".join(cells).rstrip())
        body.insert(1, "-" * max(map(len, body)))
        width = max(80, max(map(len, body)))
        return _paragraphs(self.title, "\n".join(body), "\n".join(_wrapped(self.note, width)))

    def _rows(
        self, strong: Callable[[str], str], escaped: Callable[[str], str] = str
    ) -> list[list[str]]:
        """Cells as a language writes them."""
        return [
            [
                strong(escaped(cell)) if (row, column) in self.bold else escaped(cell)
                for column, cell in enumerate(cells)
            ]
            for row, cells in enumerate(self.rows)
        ]

    def markdown(self) -> str:
        marks = ["---" if column < self.names else "---:" for column in range(len(self.header))]
        lines = [self.header, marks, *self._rows("**{}**".format)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        title = f"**{self.title}**" if self.title else ""
        return _paragraphs(title, body, self.note)

    def latex(self) -> str:
        """A ``tabular`` with the rules of booktabs, in a ``table`` with its title as caption."""
        columns = "l" * self.names + "r" * (len(self.header) - self.names)
        rows = self._rows(r"\textbf{{{}}}".format, _latex)
        lines = [" & ".join(line) + r" \\" for line in (map(_latex, self.header), *rows)]
        lines.insert(1, r"\midrule")
        caption = " ".join(f"{self.title}.".split()).strip(" .")
        note = " ".join(self.note.split())
        return "\n".join(
            [
                r"\begin{table}\centering\small",
                *([rf"\caption{{{_latex(caption)}.}}"] if caption else []),
                rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}\toprule",
                *lines,
                r"\bottomrule\end{tabular}",
                *([rf"\par\smallskip\footnotesize\raggedright {_latex(note)}"] if note else []),
                r"\end{table}",
            ]
        )


def _latex(text: str) -> str:
    return text.translate(_LATEX)


def _wrapped(note: str, width: int) -> list[str]:
    return [piece for line in note.splitlines() for piece in textwrap.wrap(line, width)]


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def text(tables: Iterable[Table]) -> str:
    return "\n\n".join(table.text() for table in tables)


def markdown(tables: Iterable[Table]) -> str:
    return "\n\n".join(table.markdown() for table in tables)


def latex(tables: Iterable[Table]) -> str:
    """Paragraphs for a document that uses booktabs."""
    return "% needs \\usepackage{booktabs}\n" + "\n\n".join(table.latex() for table in tables)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plain values for programs, with the keys of the first row as header; nothing is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
