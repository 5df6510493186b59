"""What a coordinator's report draws of its sites: what it was told, and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from perfed.core.algorithm import ClientInfo, Reply
from perfed.core.message import Message
from perfed.flower.handout import Handout, find_handout
from perfed.flower.protocol import ROUND, Envelope
from perfed.report import gather, page
from perfed.report.charts import Chart
from perfed.report.clusters import membership
from tests.flower.setting import Desk, desk, write_federation
from tests.flower.test_coordinator import lines, run
from tests.report.browser import browser
from tests.report.test_page import needs_chromium


class Listening(Desk):
    """Keeps what every site answered to every round."""

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        name = super().send(node, task, seconds)
        answer = self._arrived.get(name)
        if task.header.kind == ROUND and isinstance(answer, Envelope):
            self.heard[task.header.round, node - 10] = answer.message["soft_decisions"].numpy()
        return name

    def __init__(self, folder: Path, away: tuple[int, int] | None = None) -> None:
        fate = None
        if away is not None:

            def fate(node: int, task: Envelope) -> str | None:
                header = task.header
                gone = (header.round, node - 10) == away and header.kind == ROUND
                return "Node unavailable" if gone else None

        super().__init__(desk(folder).sites, fate)
        self.heard: dict[tuple[int, int], np.ndarray] = {}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Listening]:
    """Four rounds of PerFed-CKT; site 1 has no part in the last one."""
    folder = write_federation(tmp_path_factory.mktemp("heard") / "f", rounds=4)
    through = Listening(folder, away=(3, 1))
    run(folder, through)
    return folder / "run", through


def test_a_round_says_which_classes_an_answer_names_and_where_the_server_puts_it(
    federation: tuple[Path, Listening],
) -> None:
    """By NumPy, from the answers as they crossed and the centroids as the server kept them."""
    path, through = federation
    rounds = [line for line in lines(path, "rounds.jsonl") if line["round"] >= 0]
    for line in rounds:
        told = line["heard"]
        assert [int(client) for client in told["classes"]] == line["clients"]
        for client in line["clients"]:
            shares = through.heard[line["round"], client].astype(np.float64).mean(0)
            assert told["classes"][str(client)] == pytest.approx(shares, abs=6e-5)
    centroids = Handout.load(find_handout(path, "")).down["centroids"].numpy()
    assert rounds[-1]["clients"] == [0, 2]
    for client in (0, 2):
        distances = np.square(centroids - through.heard[3, client]).sum((1, 2))
        assert rounds[-1]["heard"]["cluster"][str(client)] == distances.argmin()


def by_name(path: Path) -> dict[str, Chart]:
    return {chart.name: chart for chart in page.draw([path]).charts}


def test_the_report_draws_it_and_nothing_that_only_sites_know(
    federation: tuple[Path, Listening],
) -> None:
    path, through = federation
    charts = by_name(path)
    assert {"clusters-1", "centroids-1", "heard"} <= charts.keys()
    assert "labels" not in charts
    newest = {0: through.heard[3, 0], 1: through.heard[2, 1], 2: through.heard[3, 2]}
    shares = {client: said.mean(0) for client, said in newest.items()}
    (tips,) = charts["heard"].tips.values()
    assert len(tips) == sum(int((own >= 0.01).sum()) for own in shares.values())
    first = int(shares[1].argmax())
    assert f"client 1: {100 * shares[1][first]:.1f} % class {first}" in tips
    assert "The site's real labels stay at the site." in charts["heard"].caption
    (found,) = (membership(one) for one in gather.read([path]))
    assert found is not None
    assert found.by_server
    assert sorted(found.chosen[0]) == [0, 1, 2, 3]
    assert sorted(found.chosen[1]) == [0, 1, 2]  # it was away
    text = page.html(page.draw([path]))
    assert "each site has its own data" in text
    assert "at-sites" not in text.split("<details>")[0]


def test_a_letter_follows_its_cluster_whatever_number_the_server_gave_it(
    federation: tuple[Path, Listening],
) -> None:
    """With two numbers exchanged after one round, in all that is said of it, the same is drawn."""
    (one,), (other,) = (gather.read([federation[0]]) for _ in range(2))
    for line in other.lines:
        overlaps = line["server_state"]["earlier_overlap"]
        if line["round"] == 2:
            told = line["heard"]["cluster"]
            line["heard"]["cluster"] = {client: 1 - cluster for client, cluster in told.items()}
            line["server_state"]["earlier_overlap"] = [row[::-1] for row in overlaps]
        if line["round"] == 3:
            line["server_state"]["earlier_overlap"] = overlaps[::-1]
    before, after = membership(one), membership(other)
    assert before is not None
    assert after is not None
    assert before.chosen == after.chosen


@pytest.mark.parametrize("name", ["hypcluster", "cosmos", "perfed-kin"])
def test_other_methods_with_clusters_say_them_too(name: str, tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f", rounds=2, algorithm={"name": name})
    run(folder, desk(folder))
    for line in lines(folder / "run", "rounds.jsonl"):
        if line["round"] >= 0:
            assert sorted(line["heard"]["cluster"]) == ["0", "1", "2"]


def test_a_kind_goes_by_its_first_member() -> None:
    import torch

    from perfed.algorithms.perfed_kin import PerFedKin

    replies = [Reply(ClientInfo(n, "mlp", 10), Message(), 1.0) for n in (2, 7, 11)]
    for numbers in ({2: 0, 7: 1, 11: 0}, {2: 1, 7: 0, 11: 1}):
        state = {"kind": {str(n): torch.tensor(kind) for n, kind in numbers.items()}}
        assert PerFedKin().placed(state, replies) == {2: 2, 7: 7, 11: 2}


def test_without_outputs_or_clusters_nothing_is_said(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f", rounds=1, algorithm="local")
    run(folder, desk(folder))
    (line,) = lines(folder / "run", "rounds.jsonl")
    assert line["heard"] == {}
    assert by_name(folder / "run").keys().isdisjoint({"clusters-1", "heard", "labels"})


@needs_chromium
def test_a_browser_shows_it_on_a_desk_and_a_phone_in_light_and_dark(
    federation: tuple[Path, Listening], tmp_path: Path
) -> None:
    path, _ = federation
    report = page.draw([path])
    written = report.write(tmp_path / "report.html")
    marks = {chart.name: sum(map(len, chart.tips.values())) for chart in report.charts}
    with browser(tmp_path / "profile") as tab:
        for width in (1280, 390):
            for dark in (False, True):
                tab.show(written, width, dark)
                assert tab.errors() == []
                assert tab.ask("document.documentElement.scrollWidth") <= width
                for name in ("clusters-1", "centroids-1", "heard"):
                    drawn = f"""[...document.querySelectorAll("#{name} [data-tip]")].filter(
                        mark => mark.getBoundingClientRect().width > 0).length"""
                    assert tab.ask(drawn) == marks[name], (name, width, dark)
