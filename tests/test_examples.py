"""The scripts and the notebook in ``examples/`` run as they are."""

import os
from pathlib import Path

import nbformat
import pytest

from tests import warm
from tests.notebook import execute

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "tour.ipynb"
SAYS = {
    "quickstart": ["perfed-ckt (c=3, λ=1)", "everything is in runs/"],
    "heterogeneous_models": ["mlp(hidden=128)", "cnn(batchnorm=True)", "numbers crossed"],
    "own_dataset_and_model": ["perfed-ckt (c=1, λ=1)"],
    "own_algorithm": ["SoftNeighbours (λ=1)", "local "],
    "compare_and_plot": ["fedavg", "comparison.png", "gains.png", "clients gained"],
}


def test_each_example_is_known_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_examples_run_and_write_only_where_they_say(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = warm.perform([EXAMPLES / f"{name}.py"], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    for words in SAYS[name]:
        assert words in done.stdout
    assert "has no result" not in done.stdout  # nothing diverged
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_the_notebook_runs_top_to_bottom_and_shows_what_it_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers may differ in their last digits between machines; what is shown may not."""
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    again = nbformat.read(NOTEBOOK, as_version=4)
    monkeypatch.chdir(tmp_path)
    execute(again)
    kinds = [
        [[(output.output_type, sorted(output.get("data", ()))) for output in cell.outputs]]
        for notebook in (stored, again)
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
    half = len(kinds) // 2
    assert kinds[:half] == kinds[half:]
    assert any("image/png" in str(kind) for kind in kinds)
    assert list(tmp_path.iterdir()) == []  # it tidies up after itself
