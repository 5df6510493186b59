"""The notebooks in ``examples/`` run as they are, and show what they have stored."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from perfed.core.algorithm import algorithms
from tests.notebook import execute

EXAMPLES = Path(__file__).parents[1] / "examples"
SAYS = {
    "idea": ["perfed-ckt (c=3, λ=2)", "weights instead", "image/png"],
    "own_data": ["perfed-kin (λ=2)", "Against local"],
    "own_method": ["soft-neighbours (λ=1)", "local "],
    "study": ["study.html", "label skew"],
    "federation": ["soft_decisions", "centroids", "personal.safetensors"],
}


def test_each_example_is_known_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SAYS)
    assert list(EXAMPLES.glob("*.py")) == []  # one set of examples


@pytest.mark.long
@pytest.mark.parametrize("name", SAYS)
def test_a_notebook_runs_top_to_bottom_and_shows_what_it_has_stored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers may differ in their last digits between machines; what is shown may not."""
    stored, again = (nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4) for _ in range(2))
    nbformat.validate(stored)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(algorithms, "_classes", dict(algorithms._classes))
    execute(again)
    assert shown(again) == shown(stored)
    for words in SAYS[name]:
        assert words in str(again)
    assert "has no result" not in str(again)  # nothing diverged
    assert list(tmp_path.iterdir()) == []  # it tidies up after itself


def shown(notebook: Any) -> list[list[tuple[str, list[str], set[str]]]]:
    """Of each cell, the kinds of what it shows, and the words in it."""
    return [
        [
            (output.output_type, sorted(output.get("data", ())), words_of(output))
            for output in cell.outputs
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def words_of(output: Any) -> set[str]:
    """Those of plain text. Numbers, and what is made of them, are left out."""
    text = output.get("text") or output.get("data", {}).get("text/plain", "")
    return set(re.findall(r"(?<![\w-])[a-z]{3,}(?![\w-])", text))


def test_stale_words_are_noticed() -> None:
    """The comparison itself: numbers may change, words may not."""
    old, same, new = (
        nbformat.v4.new_output("stream", text=text)
        for text in ("test over clients: p 0.03", "test over clients: p 0.13", "test over seeds")
    )
    assert words_of(old) == words_of(same) == {"test", "over", "clients"}
    assert words_of(old) != words_of(new)
