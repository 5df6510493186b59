"""Accuracy against communication: the points that are drawn, computed by hand."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from perfed.paper.communication import curves, figures, plot
from perfed.paper.published import TABLE_1
from perfed.paper.tables import TableRun
from tests.paper.test_tables import fake

LONG = TableRun(fractions=(0.1,), seeds=(0, 1), rounds=10)
SHORT = TableRun(fractions=(0.1,), seeds=(0, 1), rounds=5)


def records(method: str, accuracy: float) -> dict[str, Any]:
    return {
        f"paper-C0.1-{method}-seed{seed}": fake(seed, [accuracy + 0.1 * seed] * 4)
        for seed in (0, 1)
    }


def test_a_curve_is_the_mean_over_seeds_at_the_cost_so_far() -> None:
    (curve,) = curves([(LONG, records("perfed-ckt-1", 0.5))], 0.1)
    # 5 million parameters in 10 rounds, without the opening's; evaluated after 5, 8 and 10 rounds
    assert curve.cost == pytest.approx([0.25, 0.4, 0.5])
    assert curve.accuracy == pytest.approx([35, 53, 55])
    assert curve.best == pytest.approx(55)


def test_of_each_row_the_first_study_that_has_it() -> None:
    long = records("perfed-ckt-1", 0.5)
    short = records("perfed-ckt-1", 0.9) | records("fedfomo-trained", 0.6)
    found = {c.row.label: c for c in curves([(LONG, long), (SHORT, short)], 0.1)}
    assert list(found) == ["FedFomo (trained kept)", "PerFed-CKT (c=1)"]
    assert found["PerFed-CKT (c=1)"].accuracy[-1] == pytest.approx(55)
    assert [curve.rounds for curve in found.values()] == [5, 10]
    assert not curves([(LONG, long)], 0.15)


def points(axis: Axes) -> dict[str, tuple[float, float]]:
    """By label, where each marker is."""
    return {
        str(line.get_label()): (float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in axis.lines
        if line.get_marker() not in ("None", "_")
    }


def test_both_panels_show_their_numbers() -> None:
    figure = plot(curves([(LONG, records("perfed-ckt-1", 0.5))], 0.1), TABLE_1, 0.1)
    paper, here = figure.axes
    with_cost = [row.label for row in TABLE_1 if row.cost]
    assert list(points(paper)) == with_cost
    assert points(paper)["FedFomo"] == (3900, 74.62)
    assert points(here) == {"PerFed-CKT (c=1)": pytest.approx((0.5, 55))}


def test_every_row_can_be_drawn() -> None:
    """Each with a look of its own, so that no two are taken for one another."""
    found: dict[str, Any] = {}
    sending = [row for row in TABLE_1 if row.algorithm["name"] not in ("majority", "local")]
    for row in sending:
        for seed in (0, 1):
            record = fake(seed, [0.5] * 4, row.kind)
            name = LONG.name(row.algorithm, 0.1, seed)
            if name in found:  # a method's second model
                for key in ("curve", "summary"):
                    record[key] = _both(found[name][key], record[key])
            found[name] = record
    (figure,) = figures(LONG, found).values()
    looks = {
        (line.get_color(), line.get_marker(), line.get_markerfacecolor()): line.get_label()
        for line in figure.axes[1].lines
        if line.get_marker() not in ("None", "_")
    }
    assert len(looks) == len(sending)


def _both(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    if "models" in second:
        return second | {"models": first["models"] | second["models"]}
    return first | second


def test_a_figure_of_the_documentation_carries_a_stamp_of_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    drawn = importlib.import_module("drawn")

    def figure(accuracy: float) -> Any:
        shown = curves([(LONG, records("perfed-ckt-1", accuracy))], 0.1)
        return plot(shown, TABLE_1, 0.1)

    drawn.draw(tmp_path / "a.png", figure(0.5))
    assert drawn.stamp_in(tmp_path / "a.png") == drawn.stamp_of(figure(0.5))
    assert drawn.stamp_of(figure(0.5)) != drawn.stamp_of(figure(0.501))
    assert drawn.stamp_in(tmp_path / "none.png") is None
