"""The page of a study, as a browser shows it and as it is written; and its files."""

from __future__ import annotations

import csv
import re
import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path

import pytest
from matplotlib.colors import to_hex

from perfed.core.method_numbers import method_numbers
from perfed.report import theme
from perfed.report.study import StudyPage
from perfed.runs.design import Conduct, design
from perfed.runs.study import folder_name
from perfed.runs.study_tables import Outcome
from tests.conftest import SEQUENTIAL
from tests.report.browser import CHROMIUM, Page, browser
from tests.runs.test_design import STUDY

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyPage, Path]:
    folder = tmp_path_factory.mktemp("study")
    conduct = Conduct(design(STUDY), folder)
    conduct.run(SEQUENTIAL)
    page = StudyPage(Outcome(conduct.design, conduct.everything()))
    page.write(folder)
    return page, folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_each_table_is_there_in_every_form(drawn: tuple[StudyPage, Path]) -> None:
    page, folder = drawn
    markdown, latex = ((folder / f"study.{kind}").read_text() for kind in ("md", "tex"))
    html = (folder / "study.html").read_text()
    for table in page.tables.values():
        assert f"**{table.title}**" in markdown
        assert table.title in html
        assert f"\\caption{{{table.title}" in latex
        for row in table.rows:
            assert row[0] in markdown
    assert latex.count(r"\begin{tabular}") == len(page.tables) == 5
    best = page.outcome.sections[0].ranked[0]
    assert f"| {best.method} | {best.kind} | **" in markdown
    assert r"\textbf{" in latex
    files = {file.name for file in (folder / "csv").iterdir()}
    assert files == {
        "setting_groups.csv",
        "setting_IID.csv",
        "over_all_settings.csv",
        "over_all_settings__accuracy.csv",
        "chosen_settings.csv",
        "curves.csv",
    }
    for name, table in page.tables.items():
        alone = (folder / "latex" / f"{folder_name(name)}.tex").read_text()
        assert table.latex() in alone
        assert table.latex() in latex
        assert escape(table.latex()) in html  # beside the table, to copy


def test_numbers_of_a_csv_file_are_those_of_the_runs(drawn: tuple[StudyPage, Path]) -> None:
    page, folder = drawn
    with (folder / "csv" / "setting_groups.csv").open() as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    for row in page.outcome.sections[0].rows:
        told = rows[row.method]
        assert float(told["accuracy"]) == pytest.approx(100 * row.accuracy, abs=1e-4)
        assert (told["above_local"] == "") == row.is_local
        assert int(told["seeds"]) == 2


def test_the_file_needs_nothing_else(drawn: tuple[StudyPage, Path]) -> None:
    text = (drawn[1] / "study.html").read_text()
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # and no addresses
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= names


def test_a_method_has_one_colour_and_shape_in_every_table_and_figure(
    drawn: tuple[StudyPage, Path],
) -> None:
    page, _ = drawn
    numbers = method_numbers(method.name for method in page.outcome.design.methods)
    for charts in page.charts.values():
        for chart in charts:
            (axes,) = chart.figure.axes
            for dots in axes.collections:
                number = numbers[str(dots.get_label())]
                found = [f"#{int(255 * c):02x}" for c in dots.get_facecolor()[0][:3]]
                assert "".join(found).replace("#", "") == theme.colour(number)[1:]
    html = page.html()
    for name, number in numbers.items():
        marks = re.findall(rf'fill:var\(--colour-(\d)\)"/></svg>{re.escape(name)}<', html)
        assert marks == [str(number)] * 4  # two settings, and over all: ranks and accuracies


def test_gains_of_all_settings_are_in_one_figure(drawn: tuple[StudyPage, Path]) -> None:
    page, _ = drawn
    chart = page.overview[0]
    sections = page.outcome.sections
    taught = {row.method for s in sections for row in s.rows if row.gain is not None} - {"majority"}
    labels = [label.get_text() for label in chart.figure.axes[0].get_yticklabels()]
    assert set(labels) == taught
    means = [statistics.mean(s.row(name).gain for s in sections) for name in labels]
    assert means == sorted(means, reverse=True)  # the most on top
    for section, axes in zip(sections, chart.figure.axes, strict=True):
        assert axes.get_title(loc="left") == section.name
        dots = {round(-d.get_offsets()[0][1]): d for d in axes.collections}
        for place, name in enumerate(labels):
            row, dot = section.row(name), dots[place]
            assert dot.get_offsets()[0][0] == pytest.approx(row.gain)
            hollow = to_hex(dot.get_facecolor()[0]) == theme.PAPER
            assert hollow == (row.harmed_percent > 5)
            assert to_hex(dot.get_edgecolor()[0]) == theme.colour(row.number)


def test_curves_are_drawn_where_there_is_more_than_one_evaluation(tmp_path: Path) -> None:
    changes = {"methods": ["local", "fedavg"], "tuning": None, "settings": {"one": {}}}
    conduct = Conduct(design(STUDY | changes | {"evaluate_every": 1}), tmp_path)
    conduct.run(SEQUENTIAL)
    page = StudyPage(Outcome(conduct.design, conduct.everything()))
    assert page.overview == []  # of one setting
    chart = page.charts["one"][-1]
    assert chart.name == "rounds-1"
    for row, line in zip(page.outcome.sections[0].rows, chart.figure.axes[0].lines, strict=True):
        assert line.get_label() == row.method
        assert line.get_xdata().tolist() == [1, 2]
        assert line.get_ydata()[-1] == pytest.approx(100 * row.accuracy, abs=1e-3)


def test_one_figure_has_a_panel_for_every_setting(tmp_path: Path) -> None:
    changes = {"methods": ["local", "fedavg"], "tuning": None, "seeds": [0]}
    conduct = Conduct(design(STUDY | changes | {"evaluate_every": 1}), tmp_path)
    conduct.run(SEQUENTIAL, settings=["groups"])
    conduct.run(SEQUENTIAL, methods=["fedavg"])  # local has no run in the other setting
    page = StudyPage(Outcome(conduct.design, conduct.everything()))
    (chart,) = page.overview
    assert [axes.get_title("left") for axes in chart.figure.axes] == ["groups", "IID"]
    for section, axes in zip(page.outcome.sections, chart.figure.axes, strict=True):
        lines = {str(line.get_label()): line for line in axes.lines}
        assert lines.keys() == {row.method for row in section.rows}
        for row in section.rows:
            assert lines[row.method].get_color() == theme.colour(row.number)
            assert lines[row.method].get_ydata()[-1] == pytest.approx(100 * row.accuracy, abs=1e-3)
    legend = [text.get_text() for text in chart.figure.legends[0].get_texts()]
    assert sorted(legend) == ["fedavg", "local"]


def test_an_unfinished_study_says_so(tmp_path: Path) -> None:
    conduct = Conduct(design(STUDY), tmp_path)
    page = StudyPage(Outcome(conduct.design, conduct.everything()))
    page.write(tmp_path)
    html = (tmp_path / "study.html").read_text()
    assert "Not finished: 0 of 12 runs are there." in html
    assert "local, fedavg, perfed-ckt" in html  # in the list of what was not run


@needs_chromium
@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("desktop", 1200, False), ("phone", 390, False), ("dark", 1200, True)],
)
def test_the_page_is_drawn(
    drawn: tuple[StudyPage, Path], tab: Page, name: str, width: int, dark: bool
) -> None:
    page, folder = drawn
    tab.show(folder / "study.html", width, dark)
    tab.screenshot(SCREENSHOTS / f"study-{name}.png")
    assert tab.errors() == []
    assert tab.ask("document.documentElement.scrollWidth") <= width  # nothing sticks out
    figures = tab.ask("[...document.querySelectorAll('figure')].map(f => f.id)")
    assert figures == [chart.name for chart in page.all_charts]
    ink = tab.ask("getComputedStyle(document.querySelector('figure text')).fill")
    assert ink == ("rgb(232, 232, 232)" if dark else "rgb(34, 34, 34)")
