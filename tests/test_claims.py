"""benchmarks/*_blocks.py: what tables of the documentation must not leave out."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    import render


@pytest.mark.parametrize("name", ["all_algorithms", "digits-dirichlet"])
def test_who_is_harmed_stands_beside_who_gains(name: str) -> None:
    head, _, *lines = render.against_local(name).splitlines()
    assert head.endswith("| harmed % |")
    methods = render.result(name)["against_local"]["methods"]
    for line in lines:
        _, method, *_, harmed, _ = (cell.strip() for cell in line.split("|"))
        losing = [100 * seed["losing"] for seed in methods[method].values()]
        assert float(harmed) == pytest.approx(sum(losing) / len(losing), abs=0.5)
