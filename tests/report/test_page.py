"""The report as a browser shows it, and as it is written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import perfed
from perfed.report import page
from perfed.report.tables import HEADER, cells, rows
from tests.report.browser import CHROMIUM, Page, browser

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def written(comparison: perfed.ComparisonResult) -> Path:
    return comparison.report()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


class Addresses(HTMLParser):
    """What a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")
        ]


def test_the_file_needs_nothing_else_and_is_small(written: Path) -> None:
    text = written.read_text("utf-8")
    assert len(text) < 5e6
    reader = Addresses()
    reader.feed(text)
    assert all(address.startswith(("data:", "#")) for address in reader.found)
    assert "@import" not in text
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {
        "http://www.w3.org/2000/svg",  # names, not addresses
        "http://www.w3.org/1999/xlink",
    }
    assert 'http-equiv="refresh"' not in text  # only where it is watched
    assert "location.reload" not in text


@needs_chromium
@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("desktop", 1200, False), ("phone", 390, False), ("dark", 1200, True)],
)
def test_every_chart_is_drawn(
    written: Path,
    comparison: perfed.ComparisonResult,
    tab: Page,
    name: str,
    width: int,
    dark: bool,
) -> None:
    tab.show(written, width, dark)
    tab.screenshot(SCREENSHOTS / f"report-{name}.png")
    assert tab.errors() == []
    assert tab.requests() == [written.absolute().as_uri()]
    charts = page.draw([comparison.path]).charts
    drawn = tab.ask(
        """[...document.querySelectorAll("figure")].map(figure => {
             const svg = figure.querySelector("svg"), box = svg.getBoundingClientRect();
             const marks = [...svg.querySelectorAll("[data-tip]")].filter(mark => {
               const one = mark.getBoundingClientRect();
               return one.width > 0 && one.height > 0;
             });
             const text = [...svg.querySelectorAll("text")].map(t => t.textContent).join(" ");
             return [figure.id, box.width, box.height, marks.length, text,
                     figure.querySelector("figcaption").textContent];
           })"""
    )
    assert [figure[0] for figure in drawn] == [chart.name for chart in charts]
    for chart, (_, wide, high, marks, text, caption) in zip(charts, drawn, strict=True):
        assert wide > 300
        assert high > 80
        assert marks == sum(map(len, chart.tips.values())), chart.name
        assert text
        assert caption.replace("\N{NO-BREAK SPACE}", " ") == chart.caption
    assert tab.ask("document.documentElement.scrollWidth") <= width  # nothing sticks out
    ink = tab.ask("getComputedStyle(document.querySelector('figure text')).fill")
    assert ink == ("rgb(232, 232, 232)" if dark else "rgb(34, 34, 34)")


@needs_chromium
def test_the_table_on_the_page_is_the_table_of_the_runs(
    written: Path, comparison: perfed.ComparisonResult, tab: Page
) -> None:
    tab.show(written)
    shown = tab.ask(
        """[...document.querySelectorAll("#summary tr")].map(
             row => [...row.cells].map(cell => cell.textContent))"""
    )
    expected = [cells(row) for row in rows([result.summary for result in comparison.results])]
    assert shown == [list(HEADER), *expected]
    assert comparison.comparison.experiment.to_mapping()["training"]["steps"] == 2
    assert "steps: 2" in tab.ask("document.getElementById('configuration').textContent")


@needs_chromium
def test_pointing_at_a_mark_says_what_it_is(written: Path, tab: Page) -> None:
    tab.show(written)
    for chart in ("distribution", "clusters-1"):
        x, y, text = tab.ask(
            f"""(() => {{
                  const mark = document.querySelector("#{chart} [data-tip]");
                  mark.scrollIntoView({{block: "center", behavior: "instant"}});
                  const box = mark.getBoundingClientRect();
                  return [box.x + box.width / 2, box.y + box.height / 2, mark.dataset.tip];
                }})()"""
        )
        tab.settle()
        tab.move_to(x, y)
        said = tab.ask("document.getElementById('tip').innerText")
        assert tab.ask("getComputedStyle(document.getElementById('tip')).display") == "block"
        if chart == "distribution":
            assert re.match(r".+, seed \d, client \d: [\d.]+ %\n\d+ training samples", said)
        else:
            assert re.match(r"client \d, mlp.*, round [34]\n(cluster [AB], chosen|not dr)", said)
            assert text.startswith("grid:")
    assert tab.errors() == []


def test_watching_ends_with_the_runs_and_the_page_reloads_until_then(
    comparison: perfed.ComparisonResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "comparison"
    shutil.copytree(comparison.path, path)
    last = max(folder for folder in path.iterdir() if folder.is_dir())
    (last / "summary.json").rename(last / "kept")
    seen = []

    def meanwhile(seconds: float) -> None:
        """What happens while the watcher sleeps: nothing, then the last run ends."""
        seen.append((path / "report.html").read_text("utf-8"))
        if len(seen) == 2:
            (last / "kept").rename(last / "summary.json")

    monkeypatch.setattr(page.time, "sleep", meanwhile)
    page.watch([path], path / "report.html")
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert 'http-equiv="refresh"' in seen[0]
    assert "11 of 12 runs finished" in seen[0]
    assert 'http-equiv="refresh"' not in (path / "report.html").read_text("utf-8")


def test_figures_are_the_same_charts_as_files(
    comparison: perfed.ComparisonResult, tmp_path: Path
) -> None:
    whole = page.draw([comparison.path])
    report = replace(whole, charts=[whole.charts[0], whole.charts[-4]])  # a curve, a picture
    starts = {"png": b"\x89PNG", "pdf": b"%PDF"}
    for kind, start in starts.items():
        files = report.write_figures(tmp_path, kind)
        assert [file.name for file in files] == [f"{c.name}.{kind}" for c in report.charts]
        assert all(file.read_bytes().startswith(start) for file in files)


def test_a_run_that_ends_while_its_page_is_written_is_shown_once_more(
    tmp_path: Path, comparison: perfed.ComparisonResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = tmp_path / "run", tmp_path / "report.html"
    shutil.copytree(comparison.results[0].path, run)
    summary, pages = run / "summary.json", []
    summary.rename(tmp_path / "summary.json")

    def write(report: page.Report, path: Path, watched: bool = False) -> Path:
        pages.append(page.html(report, watched and not report.over))
        if len(pages) == 1:
            (tmp_path / "summary.json").rename(summary)
        return path

    monkeypatch.setattr(page.Report, "write", write)
    monkeypatch.setattr(page.time, "sleep", lambda seconds: None)
    page.watch([run], out)
    assert ['http-equiv="refresh"' in text for text in pages] == [True, False]
    assert ["Still going on" in text for text in pages] == [True, False]
