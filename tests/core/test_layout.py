"""Tables in their three forms."""

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfed.core import layout
from perfed.core.layout import Table

TABLE = Table(
    "Who & how much",
    ("name", "λ", "50 %"),
    [("a_b", "1.5 ± 0.1", "–"), ("c", "−2", "10⁷")],
    "A note, ‖ŵ‖.",
)
CELLS = st.text("abc_%&λ± ", min_size=1, max_size=8).map(str.strip)


def test_text_is_aligned() -> None:
    title, _, head, rule, first, second, *_ = TABLE.text().splitlines()
    assert title == "Who & how much"
    assert head.endswith("50 %")
    assert len(rule) == max(map(len, (head, first, second)))
    assert first.index("1.5 ± 0.1") + len("1.5 ± 0.1") == second.index("−2") + len("−2")


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=4))
def test_markdown_has_every_cell_in_its_place(rows: list[tuple[str, str, str]]) -> None:
    lines = Table("", ("x", "y", "z"), rows).markdown().splitlines()
    assert lines[1] == "| --- | ---: | ---: |"
    found = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines[2:]]
    assert found == rows


def test_latex_escapes_what_would_be_a_command() -> None:
    latex = TABLE.latex()
    assert r"a\_b & 1.5 $\pm$ 0.1 & -- \\" in latex
    assert r"50 \%" in latex
    assert r"\caption{Who \& how much.}" in latex
    assert r"\raggedright A note, $\|$$\hat w$$\|$" in latex
    cell = Table("", ("x",), [["<0.01 {a}^~\\"]]).latex()
    assert r"$<$0.01 \{a\}\^{}\~{}\textbackslash{} \\" in cell


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no LaTeX here")
def test_latex_compiles(tmp_path: Path) -> None:
    document = r"\documentclass{article}\usepackage{booktabs}\begin{document}%s\end{document}"
    (tmp_path / "t.tex").write_text(document.replace("%s", "\n" + layout.latex([TABLE]) + "\n"))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]
