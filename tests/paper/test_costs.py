"""Table 1's cost column, from messages really built."""

import pytest

from perfed.paper.costs import tables, three_digits
from tests.paper.test_tables import in_every_form

pytestmark = pytest.mark.long  # all: else another process makes the table again


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """By its command, like every single result; building VGG11's messages twice takes long."""
    found: list[dict] = in_every_form("costs", tmp_path_factory.mktemp("costs"))
    return found


def test_every_row_equals_the_papers_to_three_digits(table: list[dict]) -> None:
    assert len(table) == 16
    for row in table:
        if row["row"] != "Scaffold, as it crosses":
            assert [three_digits(ours) for ours in row["ours"]] == row["paper"], row["row"]


def test_scaffolds_control_variates_double_what_crosses(table: list[dict]) -> None:
    rows = {row["row"]: row["ours"] for row in table}
    without, crossing = rows["Scaffold, without control variates"], rows["Scaffold, as it crosses"]
    assert crossing == pytest.approx([2 * cost for cost in without])


def test_the_star_marks_what_differs(table: list[dict]) -> None:
    (shown,) = tables(table)
    starred = [row[0] for row in shown.rows if any(cell.endswith("*") for cell in row)]
    assert starred == ["Scaffold, as it crosses"]
