"""benchmarks/*_blocks.py: what tables of the documentation must not leave out."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(ROOT / "benchmarks"))
    import kin_blocks
    import paper_blocks
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


def claims() -> dict[str, str]:
    """What was found and the verdict, by claim."""
    lines = [line for line in paper_blocks.claims().splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    return {claim: f"{found} {verdict}" for claim, _, found, verdict in rows}


def test_what_the_paper_says_of_clusters_networks_rounds_and_its_appendix_is_on_the_list() -> None:
    named = " ".join(claims())
    for words in ("too many clusters", "different networks", "enough for all", "appendix"):
        assert words in named


def test_a_claim_is_judged_by_the_longest_runs_too() -> None:
    long = paper_blocks.table1_rows("paper", paper_blocks.ALL)
    for claim, label in (("as accurate as FedFomo", "FedFomo"), ("Ditto's", "Ditto (LM)")):
        found = next(text for name, text in claims().items() if name.startswith(claim))
        assert paper_blocks.spread(long[label].values("last")) in found
    assert "keeps the trained model" in claims()["as accurate as FedFomo"]  # not its authors'


@pytest.mark.parametrize(("family", "largest"), [("digits", "32"), ("digits-three", "8")])
def test_the_kin_tables_name_what_was_tried_and_how_good_their_interval_is(
    family: str, largest: str
) -> None:
    note = kin_blocks.comparison(family).splitlines()[-1]
    assert f"λ of PerFed-CKT (0.1, 0.5, 2, 8{', 32' * (largest == '32')}) and Ditto" in note
    assert "too narrow" in note
    chosen = kin_blocks.result(f"kin_tune_{family}")["chosen"]
    assert max(weight for by in chosen.values() for weight in by.values()) == float(largest)


def test_columns_of_numbers_are_set_to_the_right_where_a_page_is_rendered() -> None:
    table = "| | a | b |\n|---|---|---|\n| **x** | **1.5 ± 0.2** | global 2 |\n| y | – | 3 |"
    assert render.aligned(table) == table.replace("|---|---|---|", "|---|---:|---|")
