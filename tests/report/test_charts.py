"""Charts say what the runs say."""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.colors import to_hex

import perfed
from perfed.report import gather, page
from perfed.report.charts import Chart, _highest_and_lowest
from perfed.report.export import frames
from perfed.report.svg import inline_svg
from perfed.report.theme import COLOURS, GROUPS, VARIABLES
from perfed.runs.tables import HARM, against_local
from tests.conftest import tiny, without_checksums


@pytest.fixture(scope="module")
def drawn(comparison: perfed.ComparisonResult) -> dict[str, Chart]:
    return {chart.name: chart for chart in page.draw([comparison.path]).charts}


def test_every_chart_is_there(drawn: dict[str, Chart]) -> None:
    assert list(drawn) == [
        "accuracy",
        "communication",
        "clients",
        "distribution",
        "gains",
        "clusters-1",
        "centroids-1",
        "clusters-2",
        "labels",
        "time",
    ]


def test_captions_hold_the_numbers_of_the_runs(
    drawn: dict[str, Chart], comparison: perfed.ComparisonResult
) -> None:
    frame = frames(gather.read([comparison.path]))["clients"]
    last = frame[frame["round"] == 5].set_index(["seed", "client"])
    ends = {label: group["test_accuracy"] for label, group in last.groupby("label")}
    for label, accuracies in ends.items():
        assert f"{label} " in drawn["accuracy"].caption
        assert f"at {100 * accuracies.mean():.1f} %" in drawn["accuracy"].caption
        assert f"{label}: median {100 * accuracies.median():.0f} %" in drawn["distribution"].caption
    for label in ("fedavg", "perfed-ckt (c=2, λ=1)", "hypcluster (c=2)"):
        gains = (ends[label] - ends["local"]).to_numpy()  # aligned by seed and client
        gaining, losing = (gains > HARM / 100).sum(), (gains < -HARM / 100).sum()
        said = f"{label}: {gaining} of 18 clients gain, {losing} lose, "
        assert said + f"{100 * gains.mean():+.1f}".replace("-", "−") in drawn["gains"].caption
    assert f"more than {HARM:g} points above" in drawn["gains"].caption


def test_chart_and_table_count_the_same_clients_as_gaining(
    comparison: perfed.ComparisonResult, tmp_path: Path
) -> None:
    """Where the gain is the threshold itself, only the digits decide: 7 of 150 less 4 of 150."""
    for result, right in zip(comparison.results[0:6:3], (4, 7), strict=True):
        without_checksums(Path(shutil.copytree(result.path, tmp_path / str(right))))
        file = tmp_path / str(right) / "clients.jsonl"
        *lines, last = file.read_text().splitlines(keepends=True)
        numbers = json.loads(last)
        for kind in {"personal", "global"} & set(numbers):
            numbers[kind]["test_accuracy"] = [right / 150] * 6
        file.write_text("".join(lines) + json.dumps(numbers) + "\n")
    paths = [tmp_path / "4", tmp_path / "7"]
    table = against_local([perfed.Result(path) for path in paths])
    drawn = {chart.name: chart for chart in page.draw(paths).charts}
    said = re.search(r"fedavg: (\d) of 6 clients gain", drawn["gains"].caption)
    assert table is not None
    assert said is not None
    assert f"{100 * int(said[1]) / 6:.0f}" == table.rows[0][3]


def test_the_price_of_an_accuracy_is_the_first_round_that_has_it(
    drawn: dict[str, Chart], comparison: perfed.ComparisonResult
) -> None:
    means = {}
    for label in ("fedavg", "perfed-ckt (c=2, λ=1)", "hypcluster (c=2)"):
        runs = [r for r in comparison.results if r.experiment.algorithm.label() == label]
        frames = [r.per_round().set_index("round") for r in runs]
        accuracy = sum(frame["test_accuracy"] for frame in frames) / 3
        sent = sum(f["total_up_parameters"] + f["total_down_parameters"] for f in frames) / 3
        means[label] = (accuracy, sent)
    goal = min(accuracy.max() for accuracy, _ in means.values())
    for label, (accuracy, sent) in means.items():
        price = sent[accuracy >= goal - 1e-12].iloc[0]
        said = re.search(
            rf"{re.escape(label)} after ([\d.]+) ([kM]?)", drawn["communication"].caption
        )
        assert said is not None
        factor = {"": 1, "k": 1e3, "M": 1e6}[said[2]]
        assert float(said[1]) * factor == pytest.approx(price, rel=0.01)


def test_marks_and_texts_belong_together(drawn: dict[str, Chart]) -> None:
    """The dots of a chart stand where their texts say."""
    axes = drawn["distribution"].figure.axes[0]
    dots = {group.get_gid(): group.get_offsets() for group in axes.collections}
    for name, texts in drawn["distribution"].tips.items():
        said = [float(re.search(r": ([\d.]+) %", text)[1]) for text in texts]  # type: ignore[index]
        np.testing.assert_allclose(dots[name][:, 0], said, atol=0.051)


def test_no_bar_hides_a_client(drawn: dict[str, Chart]) -> None:
    axes = drawn["distribution"].figure.axes[0]
    bars = np.concatenate([np.asarray(line.get_ydata()) for line in axes.lines])
    for group in axes.collections:
        heights = np.asarray(group.get_offsets())[:, 1]
        assert not np.any((bars > heights.min() - 0.04) & (bars < heights.max() + 0.04))


def test_svg_has_a_mark_for_every_text_and_colours_of_the_page(drawn: dict[str, Chart]) -> None:
    every_id: list[str] = []
    for chart in drawn.values():
        text = inline_svg(chart)
        root = ElementTree.fromstring(text)
        tips = [e.get("data-tip") for e in root.iter() if e.get("data-tip")]
        assert tips == [tip for group in chart.tips.values() for tip in group]
        assert root.get("aria-label") == chart.title
        assert "width" not in root.attrib
        for light, _ in VARIABLES.values():
            assert light not in text
        every_id += re.findall(r'\bid="([^"]+)"', text)
        for target in re.findall(r'(?:href="|url\()#([^")]+)', text):
            assert target in every_id
    assert len(set(every_id)) == len(every_id)  # on one page they must not meet


def test_a_text_too_many_is_noticed(drawn: dict[str, Chart]) -> None:
    chart = drawn["accuracy"]
    name = next(iter(chart.tips))
    broken = Chart(chart.name, "", chart.figure, tips={name: [*chart.tips[name], "one more"]})
    with pytest.raises(AssertionError, match="marks and"):
        inline_svg(broken)


def test_dark_and_light_colours_stand_out_from_their_ground() -> None:
    """Contrast as WCAG counts it: 4.5 for text, 2 for curves (which are labelled besides)."""

    def brightness(colour: str) -> float:
        parts = np.array([int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)])
        linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    for ground in (0, 1):
        paper = brightness(VARIABLES["--paper"][ground])

        def contrast(name: str, ground: int = ground, paper: float = paper) -> float:
            low, high = sorted([brightness(VARIABLES[name][ground]), paper])
            return (high + 0.05) / (low + 0.05)

        assert contrast("--ink") > 7
        assert contrast("--muted") > 4.5
        assert min(contrast(f"--colour-{n}") for n in range(len(COLOURS))) > 2


def test_one_run_alone_and_before_its_first_round(tmp_path: Path) -> None:
    names = {}

    class Draw(perfed.Callback):
        def on_start(self, experiment: object, directory: Path, first_round: int) -> None:
            names[-1] = [chart.name for chart in page.draw([directory]).charts]

        def on_round(self, report: perfed.runs.RoundReport) -> None:
            drawn = page.draw([tmp_path / "run"])
            names[report.round] = [chart.name for chart in drawn.charts]
            text = page.html(drawn, reload=True)
            assert f"round {report.round + 1} of 3" in text
            assert "Still going on" in text

    result = perfed.run(tiny(), tmp_path / "run", callbacks=[Draw()])
    assert names[-1] == ["labels"]
    some = ["accuracy", "communication", "distribution", "clusters-1", "centroids-1"]
    assert names[0] == names[2] == [*some, "labels", "time"]
    text = result.report().read_text()
    assert "Still going on" not in text
    assert "refresh" not in text


def test_a_silent_method_alone_has_no_communication_chart(tmp_path: Path) -> None:
    perfed.run(tiny(algorithm="local", rounds=1), tmp_path / "run")
    names = [chart.name for chart in page.draw([tmp_path / "run"]).charts]
    assert names == ["accuracy", "distribution", "labels", "time"]


def test_rounds_in_which_nothing_has_crossed_yet_are_not_on_a_scale_of_logarithms(
    tmp_path: Path,
) -> None:
    quiet = {"name": "silent", "share": 0.5}  # and the first that is selected is one of them
    method = {"algorithm": "perfed-kin", "clients_per_round": 1, "hostile": quiet}
    for seed in range(20):
        result = perfed.run(tiny(rounds=6, seed=seed, **method), tmp_path / str(seed))
        frame = result.per_round()
        sent = frame["total_up_parameters"] + frame["total_down_parameters"]
        if sent.iloc[0] == 0 < sent.iloc[-1]:
            break
    else:
        pytest.fail("in no run the first round was silent")
    charts = {chart.name: chart for chart in page.draw([result.path]).charts}
    (texts,) = charts["communication"].tips.values()
    assert len(texts) == (sent > 0).sum() < 6
    assert "communication" in result.report().read_text()


def test_classes_and_clients_go_by_the_names_the_data_gives_them(tmp_path: Path) -> None:
    rows = [f"{n},{'cat' if n % 2 else 'dog'},{'north' if n < 30 else 'south'}" for n in range(60)]
    (tmp_path / "own.csv").write_text("\n".join(["x,kind,site", *rows]))
    data = {"name": "csv", "path": str(tmp_path / "own.csv"), "target": "kind", "client": "site"}
    few = {"rounds": 1, "clients": 2, "clients_per_round": 1}
    perfed.run(tiny(algorithm="local", data=data, partition="given", **few), tmp_path / "run")
    drawn = {chart.name: chart for chart in page.draw([tmp_path / "run"]).charts}
    labels = drawn["labels"]
    shown = [text.get_text() for text in labels.figure.axes[0].get_yticklabels()]
    assert shown == ["cat", "dog"]
    tips = [tip for tips in labels.tips.values() for tip in tips]
    assert any("(north)" in tip and "of label cat" in tip for tip in tips)


def test_the_same_runs_give_the_same_page(comparison: perfed.ComparisonResult) -> None:
    run = comparison.results[6].path
    one, other = (page.html(page.draw([run])) for _ in range(2))
    assert one == other


def test_a_federation_has_what_its_coordinator_knows(
    comparison: perfed.ComparisonResult, tmp_path: Path
) -> None:
    """Of its sites: sizes, but neither labels nor clusters, and nothing of one that never came."""
    run = tmp_path / "run"
    without_checksums(Path(shutil.copytree(comparison.results[6].path, run)))
    record = json.loads((run / "partition.json").read_text())
    sites: list[dict[str, object] | None] = [
        {"architecture": c["architecture"], "sizes": {p: len(c[p]) for p in ("train", "test")}}
        for c in record["clients"]
    ]
    sites[2] = None
    (run / "partition.json").write_text(json.dumps({"clients": sites}))
    for name in ("rounds.jsonl", "clients.jsonl"):
        lines = [json.loads(line) for line in (run / name).read_text().splitlines()]
        for line in lines:
            line.pop("client_state", None)
            for values in line.get("personal", {}).values():
                values[2] = None
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    charts = {chart.name: chart for chart in page.draw([run]).charts}
    assert list(charts) == ["accuracy", "communication", "distribution", "time"]
    (dots,) = charts["distribution"].tips.values()
    assert len(dots) == 5
    assert not any("client 2:" in text for text in dots)


def test_one_cluster_needs_no_card_and_clusters_have_colours_of_their_own(tmp_path: Path) -> None:
    methods = [{"name": "perfed-ckt", "clusters": clusters} for clusters in (1, 2)]
    runs = [
        perfed.run(tiny(algorithm=method), tmp_path / str(n)) for n, method in enumerate(methods)
    ]
    charts = {chart.name: chart for chart in page.draw([run.path for run in runs]).charts}
    assert [name for name in charts if name.startswith("clusters")] == ["clusters-1"]
    assert "c=2" in charts["clusters-1"].title
    in_page = {light for light, _ in VARIABLES.values()}
    assert not {*GROUPS} & in_page  # the page changes none of them: pixels and legend are alike
    (axes,) = charts["clusters-1"].figure.axes
    pixels = {to_hex(pixel[:3]) for row in axes.images[0].get_array() for pixel in row if pixel[3]}
    assert pixels <= {str(line.get_color()) for line in axes.lines}


def test_a_second_model_has_its_methods_colour_and_gaps(tmp_path: Path) -> None:
    """Ditto's global model is FedAvg's: both must be seen."""
    runs = [
        perfed.run(tiny(algorithm=name, models=["mlp"]), tmp_path / name)
        for name in ("fedavg", "ditto")
    ]
    (axes,) = page.draw([run.path for run in runs]).charts[0].figure.axes
    average, personal, shared = axes.lines
    assert average.get_ydata().tolist() == pytest.approx(shared.get_ydata().tolist())
    assert average.get_linestyle() == personal.get_linestyle() == "-"
    assert shared.get_linestyle() == "--"  # as matplotlib calls any dashes
    assert shared.get_zorder() > average.get_zorder()
    assert personal.get_color() == shared.get_color() != average.get_color()


def test_no_dot_is_cut_and_dots_in_one_place_are_beside_each_other(
    drawn: dict[str, Chart],
) -> None:
    for name in ("gains", "distribution"):
        for axes in drawn[name].figure.axes:
            if not axes.get_visible():
                continue
            for dots in axes.collections:
                places = np.asarray(dots.get_offsets())
                (left, right), (bottom, top) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
                assert places[:, 0].min() >= left
                assert places[:, 0].max() <= right
                assert places[:, 1].min() >= bottom
                assert places[:, 1].max() <= top
                assert len({tuple(place) for place in places.round(6)}) == len(places)


def test_of_many_methods_the_two_ends_are_named_and_no_stop_follows_the_dots() -> None:
    words = [(float(place), f"method {place} gains") for place in range(6)]
    said = _highest_and_lowest(words, ". ")
    assert said == "method 5 gains. method 4 gains. … method 1 gains. method 0 gains"
