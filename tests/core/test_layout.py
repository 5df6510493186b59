"""Tables in their three forms."""

import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfed.core import layout
from perfed.core.algorithm import algorithms
from perfed.core.layout import Table
from perfed.runs import tables
from perfed.runs.significance import FEW

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


def test_latex_writes_numbers_and_options_as_they_are_read() -> None:
    """A hyphen is no minus, two are no dash, a bracket does not belong to the line before."""
    cells = ["-1.5 [-2.0, +1]", "perfed-ckt", "1e-05", "--set a|b", "0-2"]
    latex = Table("", ("a", "b", "c", "d", "e"), [cells, ["[x]", "*", "", "", ""]]).latex()
    assert r"$-$1.5 [$-$2.0, +1] & perfed-ckt & 1e-05 & -{}-set a$|$b & 0-2 \\" in latex
    assert "\n{}[x] & * &" in latex


# What LaTeX prints by itself with UTF-8 as its input: ASCII, and accented Latin letters.
PRINTED = re.compile("[\x20-\x7eÀ-ÖØ-öø-ÿ]*")


def names_with_symbols() -> list[str]:
    """All that can stand in the column of methods: every label, and the symbols of options."""
    kinds = [algorithms[name] for name in algorithms]
    symbols = [option.metadata.get("symbol", "") for kind in kinds for option in fields(kind)]
    return [*(kind().label() for kind in kinds), *symbols]


def notes() -> list[str]:
    """What tables say below them."""
    return [tables.FOOTNOTE, tables.NOT_CHOSEN, tables.PRIVATE, tables.AGAINST_LOCAL_NOTE, FEW]


SIGNS = Table("ε, δ: 10⁻⁵", ("λ", "b↑"), [[c, c] for c in map(chr, layout._LATEX)], "A ≤ B ≠ C.")
EVERY_SIGN = Table("", ("",), [[text] for text in (*names_with_symbols(), *notes(), *SIGNS.header)])


def test_latex_prints_every_sign_of_every_method() -> None:
    assert any("γ" in name for name in names_with_symbols())
    for table in (EVERY_SIGN, SIGNS):
        assert PRINTED.fullmatch(table.latex().replace("\n", " "))


def test_markdown_keeps_a_bar_in_a_name() -> None:
    assert Table("", ("x",), [["|P|=9"]]).markdown().splitlines()[2] == r"| \|P\|=9 |"


def test_markdown_does_not_take_stars_in_a_note_for_italics() -> None:
    table = Table("", ("x",), [], "best*: at best; best* − paper")
    assert "best\\*: at best; best\\* − paper" in table.markdown()


WIDE = Table("Wide", [f"column {n}" for n in range(20)], [["12.3 ± 4.5"] * 20])
DOCUMENT = r"\documentclass{article}%s\begin{document}%s\end{document}"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no LaTeX here")
@pytest.mark.parametrize(
    "table", [TABLE, EVERY_SIGN, SIGNS, WIDE], ids=["plain", "labels", "signs", "wide"]
)
def test_latex_compiles_and_fits_the_page(table: Table, tmp_path: Path) -> None:
    document = DOCUMENT % (layout.PACKAGES, "\n" + layout.latex([table]) + "\n")
    (tmp_path / "t.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    log = (tmp_path / "t.log").read_text(errors="replace")
    assert "Missing character" not in log
    assert r"Overfull \hbox" not in log


def test_a_note_breaks_lines_only_where_sentences_end() -> None:
    note = "One sentence that is broken\nsomewhere in the source.\nAnother."
    last = Table("", ("x",), [["1"]], note).text().splitlines()[-2:]
    assert last == ["One sentence that is broken somewhere in the source.", "Another."]
