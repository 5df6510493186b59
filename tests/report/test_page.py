"""The report as a browser shows it, and as it is written."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import perfed
from perfed.core.layout import with_minus
from perfed.report import gather, page
from perfed.runs.directory import RunDirectory
from perfed.runs.tables import HEADER, cells, quantity, rows, standing
from tests.conftest import TINY, tiny
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


def words_of(paths: list[Path]) -> str:
    """A page without its marks."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", page.html(page.draw(paths)))))


def test_all_tiles_are_of_the_method_that_they_name(comparison: perfed.ComparisonResult) -> None:
    drawn = page.draw([comparison.path])
    best = max(drawn.curves, key=gather.Series.last)
    html = page.html(drawn)
    title = re.search(r'<h2 class="whose">.*?</i>(.*?)</h2>', html)
    assert title is not None
    assert title[1] == f"{best.label} has the highest mean test accuracy at the end"
    local = next(curve for curve in drawn.curves if curve.label == "local")
    gain = [] if best is local else [f"{100 * (best.last() - local.last()):+.1f} points"]
    sent = best.cost(5, "bytes")
    assert re.findall(r'<div class="tile"><b>(.*?)</b>', html) == [
        f"{100 * best.last():.1f} %",
        *gain,
        f"{100 * best.worst_tenth():.1f} %",
        *([quantity(sent, "B")] if sent else []),
    ]


def test_one_seed_is_said(tmp_path: Path) -> None:
    names = ("local", "fedavg")
    paths = [
        perfed.run(tiny(rounds=1, algorithm=name, seed=3), tmp_path / name).path for name in names
    ]
    words = words_of(paths)
    assert "one seed (3)" in words
    assert "at the end, with one seed" in words
    assert "One seed: another one divides the data anew, and the order may change." in words
    assert "One seed: how much another would change is not known." in words_of(paths[1:])


def test_runs_on_different_data_are_never_ranked(tmp_path: Path) -> None:
    parts = ("iid", {"name": "groups", "groups": 2})
    paths = [
        perfed.run(tiny(rounds=1, algorithm="fedavg", partition=part), tmp_path / str(n)).path
        for n, part in enumerate(parts)
    ]
    html = page.html(page.draw(paths))
    assert "Not all are on the same data, so none is called the highest." in html
    assert "highest mean" not in html
    assert '<div class="tiles">' not in html
    assert "<b>" not in html


def test_the_best_is_bold_and_what_is_not_told_apart_is_named(
    comparison: perfed.ComparisonResult, written: Path
) -> None:
    found = standing(comparison.results)
    assert found is not None
    text = written.read_text("utf-8")
    (summary,) = re.findall(r'<table id="summary">.*?</table>', text, re.S)
    bold = re.findall(r'</i>([^<]*)</td><td class="word">[^<]*</td><td><b>', summary)
    assert sorted(map(unescape, bold)) == sorted([found.best, *found.alike])
    assert found.note() in unescape(text)
    assert found.note() in " ".join(comparison.table().split())


@needs_chromium
def test_a_table_that_goes_on_has_a_shadow_there(written: Path, tab: Page) -> None:
    """At the left of its bar no shadow on the left; the pixels at the right differ."""
    tab.show(written, 390)
    wide, seen = tab.ask(
        "[document.querySelector('.scroll')].flatMap(s => [s.scrollWidth, s.clientWidth])"
    )
    assert wide > seen
    layers = tab.ask("getComputedStyle(document.querySelector('.scroll')).backgroundAttachment")
    assert layers == "local, local, scroll, scroll"


def test_latex_beside_the_comparison(comparison: perfed.ComparisonResult) -> None:
    text = comparison.latex().read_text()
    assert text.count(r"\begin{tabular}") == 2
    assert r"\caption{experiment: 3 seeds.}" in text
    assert r"\textbf{" in text


def test_methods_with_different_seeds_are_not_said_to_have_the_same(tmp_path: Path) -> None:
    slow = TINY["training"] | {"learning_rate": 0.05}
    experiments = [
        tiny(rounds=1, algorithm="local", training=slow, seed=0),
        tiny(rounds=1, algorithm="local", seed=1),
    ]
    paths = [perfed.run(e, tmp_path / str(n)).path for n, e in enumerate(experiments)]
    words = words_of(paths)
    assert "seeds 0, 1" not in words
    assert (
        "Not all have the same seeds, and another seed divides the data in another way. "
        "seed 0: local · training.learning_rate=0.05; seed 1: local · training.learning_rate=0.1."
    ) in words


def test_a_method_is_not_set_against_local_training_of_another_seed(
    comparison: perfed.ComparisonResult, tmp_path: Path
) -> None:
    learning_nothing = TINY["training"] | {"learning_rate": 1e-6}
    method = comparison.results[6]
    for seed in (0, 1):
        alone = tiny(rounds=1, algorithm="local", training=learning_nothing, seed=seed)
        perfed.run(alone, tmp_path / str(seed))
        said = "above training alone" in words_of([method.path, tmp_path / str(seed)])
        assert said == (seed == method.experiment.seed)


def test_who_gains_against_local_training_is_the_table_of_the_terminal(
    comparison: perfed.ComparisonResult, written: Path
) -> None:
    found = re.search(r'<table id="against-local">.*?</table>', written.read_text("utf-8"), re.S)
    assert found is not None
    lines = re.findall(r"<tr>(.*?)</tr>", found[0])
    lines = [re.sub("</?b>", "", line) for line in lines]
    shown = [[unescape(c) for c in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", line)] for line in lines]
    table = comparison.tables()[1]
    assert shown == [list(table.header), *([*map(with_minus, row)] for row in table.rows)]
    (caption,) = [c.caption for c in page.draw([comparison.path]).charts if c.name == "gains"]
    for method, *_, gaining, losing in table.rows:
        said = re.search(rf"{re.escape(method)}: (\d+) of 18 clients gain, (\d+) lose", caption)
        assert said is not None
        assert [gaining, losing] == [f"{100 * int(count) / 18:.0f}" for count in said.groups()]


def test_runs_with_other_settings_are_not_in_one_table_against_local(tmp_path: Path) -> None:
    other = tiny(rounds=2, algorithm="majority")
    perfed.run(tiny(rounds=1, algorithm="local"), tmp_path / "local")
    perfed.run(tiny(rounds=1, algorithm="majority"), tmp_path / "same")
    perfed.run(other, tmp_path / "other")
    assert "Against local" in words_of([tmp_path / "local", tmp_path / "same"])
    assert "Against local" not in words_of([tmp_path / "local", tmp_path / "other"])


class Stop(perfed.Callback):
    """As Ctrl-C after the second round."""

    def on_round(self, report: perfed.runs.RoundReport) -> None:
        if report.round == 1:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_says_how_it_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        perfed.run(tiny(rounds=4, algorithm="fedavg"), path, callbacks=[Stop()])
    stopped = words_of([path])
    assert (
        "Stopped. 0 of 1 runs finished; fedavg, seed 0: stopped after round 2 of 4. "
        f"To go on: perfed run --resume {path} " in stopped
    )
    assert "Not finished, so after the last evaluation: fedavg, seed 0 (round 2)." in stopped
    with RunDirectory(path).locked():
        going_on = words_of([path])
    assert "Still going on. 0 of 1 runs finished; fedavg, seed 0: round 2 of 4." in going_on
    for words in (stopped, going_on):
        assert "over all clients so far" in words
        assert "B sent so far" in words
        assert re.search(r"fedavg is at [\d.]+ % so far", words)
        assert not re.search("at the end|in the end|fedavg ends|clients end|in all", words)
    (path / "federation.json").write_text("{}")
    assert f"To go on with {path}, start its coordinator again." in words_of([path])
    (path / "federation.json").unlink()
    perfed.resume(path)
    finished = words_of([path])
    assert "over all clients at the end" in finished
    assert re.search(r"fedavg ends at [\d.]+ %\.", finished)
    assert not re.search("Stopped|Not finished|so far", finished)


def test_of_a_comparison_that_was_stopped_the_whole_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "comparison"
    base = tiny(rounds=4, algorithm="local")
    with pytest.raises(KeyboardInterrupt):
        perfed.compare(perfed.Comparison(base, (base.algorithm,), (0, 1)), path, callbacks=[Stop()])
    words = words_of([path])
    assert "0 of 2 runs finished; local, seed 0: stopped after round 2 of 4; 1 not begun." in words
    assert f"To go on: perfed run --resume {path} " in words
    assert f"perfed run --resume {path / 'local-seed0'} " in words_of([path / "local-seed0"])


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
    with RunDirectory(run).locked():
        page.watch([run], out)
    assert ['http-equiv="refresh"' in text for text in pages] == [True, False]
    assert ["Still going on" in text for text in pages] == [True, False]
