"""A table as plain text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "ζ": "zeta",
    "η": "eta", "θ": "theta", "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu",
    "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "υ": "upsilon", "φ": "varphi",
    "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta",
    "Λ": "Lambda", "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
SIGNS = {
    "±": "pm", "·": "cdot", "‖": "|", "∇": "nabla", "×": "times", "≤": "le", "≥": "ge",
    "≠": "ne", "≈": "approx", "∞": "infty", "√": "surd", "∝": "propto", "ℓ": "ell",
    "→": "rightarrow", "←": "leftarrow", "↑": "uparrow", "↓": "downarrow",
}  # fmt: skip
RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-", strict=True))
# What LaTeX takes for a command, and what its usual fonts lack or print as something else.
_LATEX = str.maketrans(
    {c: rf"\{c}" for c in "%&#_$"}
    | {c: f"${c}$" for c in "<>|"}
    | {c: rf"$\{name}$" for c, name in (GREEK | SIGNS).items()}
    | {c: f"$^{plain}$" for c, plain in RAISED.items()}
    | {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "^": r"\^{}",
        "~": r"\~{}",
        "…": r"\dots{}",
        "−": r"$-$",
        "–": "--",
        "ŵ": r"$\hat w$",
        "\u0304": "",  # the bar over s
    }
)
PACKAGES = r"\usepackage{booktabs,graphicx}"
_MINUS = re.compile(r"(?<![\w.)])-(?=\d)")  # a hyphen is too short for one


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
        lines = [self.header, marks, *self._rows("**{}**".format, _markdown)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        title = f"**{self.title}**" if self.title else ""
        return _paragraphs(title, body, self.note.replace("*", r"\*"))

    def latex(self) -> str:
        """A ``tabular`` with the rules of booktabs, in a ``table`` with its title as caption.

        What is wider than the text is made smaller.
        """
        columns = "l" * self.names + "r" * (len(self.header) - self.names)
        rows = self._rows(r"\textbf{{{}}}".format, _latex)
        lines = [_latex_line(line) for line in (map(_latex, self.header), *rows)]
        lines.insert(1, r"\midrule")
        caption = " ".join(f"{self.title}.".split()).strip(" .")
        note = " ".join(self.note.split())
        return "\n".join(
            [
                r"\begin{table}\centering\small",
                *([rf"\caption{{{_latex(caption)}.}}\smallskip"] if caption else []),
                r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
                rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}\toprule",
                *lines,
                r"\bottomrule\end{tabular}}",
                *([rf"\par\smallskip\footnotesize\raggedright {_latex(note)}"] if note else []),
                r"\end{table}",
            ]
        )


def _markdown(text: str) -> str:
    return text.replace("|", r"\|")


def _latex_line(cells: Iterable[str]) -> str:
    """A line that begins with a bracket or a star would be read as part of the one before."""
    line = " & ".join(cells) + r" \\"
    return f"{{}}{line}" if line[0] in "[*" else line


def with_minus(text: str) -> str:
    """Numbers below zero with a minus, as a page or a paper prints them."""
    return _MINUS.sub("\N{MINUS SIGN}", text)


def _latex(text: str) -> str:
    """Letters of other alphabets stay as they are: LuaLaTeX has fonts for them."""
    parts = with_minus(text).split("--")  # two hyphens would become a dash
    return "-{}-".join(part.translate(_LATEX) for part in parts)


def _wrapped(note: str, width: int) -> list[str]:
    """A new line only where a sentence ends."""
    lines = re.sub(r"(?<![.:])\n", " ", note).splitlines()
    return [piece for line in lines for piece in textwrap.wrap(line, width)]


def _paragraphs(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def text(tables: Iterable[Table]) -> str:
    return "\n\n".join(table.text() for table in tables)


def markdown(tables: Iterable[Table]) -> str:
    return "\n\n".join(table.markdown() for table in tables)


def latex(tables: Iterable[Table]) -> str:
    """Paragraphs for a document that uses booktabs and graphicx."""
    return "\n\n".join([f"% needs {PACKAGES}", *(table.latex() for table in tables)])


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Plain values for programs, with the keys of the first row as header; nothing is empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
