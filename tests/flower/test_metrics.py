"""What Prometheus sees: parsed by its own client, and compared with the run's files."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perfed.flower.installing import dashboard
from perfed.flower.metrics import health_of_site, of_site
from perfed.flower.overview import look
from tests import warm
from tests.flower.processes import free_port, listens, wait_until
from tests.flower.setting import desk, write_federation
from tests.flower.test_coordinator import run
from tests.flower.test_upkeep import Killed


def fetched(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def numbers(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_coordinator_and_a_site_are_watched_from_their_files(tmp_path: Path) -> None:
    folder = write_federation(tmp_path / "f", rounds=2)
    with pytest.raises(KeyboardInterrupt):
        run(folder, Killed(folder, 1))
    ports = free_port(), free_port()
    commands = [
        ["federation", "metrics", folder / "run", "--port", ports[0]],
        ["site", "metrics", folder / "site-1.yaml", "--port", ports[1]],
    ]
    started = [warm.start(command) for command in commands]
    try:
        wait_until(lambda: all(map(listens, ports)), "both listen")
        code, why = fetched(ports[0], "/health")
        assert (code, why) == (503, "nobody is at work: dead\n")
        assert numbers(fetched(ports[0], "/metrics")[1])["perfed_run_well", ""] == 0
        run(folder, desk(folder))
        assert fetched(ports[0], "/health") == fetched(ports[1], "/health") == (200, "well\n")
        text = fetched(ports[0], "/metrics")[1]
        state, told = look(folder / "run"), numbers(text)
        assert told["perfed_rounds_done", ""] == told["perfed_rounds", ""] == 2
        assert told["perfed_message_bytes", ""] == state.bytes
        for site in state.sites:
            assert told["perfed_site_accuracy", str(site.client)] == site.accuracy
            assert told["perfed_site_rounds", str(site.client)] == 2
        own = numbers(fetched(ports[1], "/metrics")[1])
        assert own["perfed_own_round", ""] == 1
        ledger = (folder / "state-1" / "ledger.jsonl").read_text().splitlines()
        assert own["perfed_ledger_lines", "left"] == sum('"left"' in line for line in ledger)
        assert fetched(ports[0], "/else")[0] == 404
        with socket.create_connection(("127.0.0.1", ports[1])):  # and says nothing
            assert fetched(ports[1], "/health")[0] == 200
        (folder / "state-1" / "ledger.jsonl").write_text("\n".join(ledger[1:]) + "\n")
        assert fetched(ports[1], "/health")[0] == 503  # somebody has changed the ledger
    finally:
        for process in started:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(60)
    assert_dashboard_asks_for(text)


@pytest.mark.attack("metrics-of-damaged-files")
@pytest.mark.parametrize("report", ['{"round": 0, "test_accuracy": 0.5}\n{"rou', "", "[]", "\0"])
def test_damaged_files_of_a_site_are_no_end_of_its_metrics(tmp_path: Path, report: str) -> None:
    folder = write_federation(tmp_path / "f", rounds=1)
    run(folder, desk(folder))
    state = folder / "state-0"
    (path,) = state.glob("*/report.jsonl")
    path.write_text(report)
    ledger = (state / "ledger.jsonl").read_text()
    (state / "ledger.jsonl").write_text(ledger.replace('"event":"asked"', '"event":["asked"]', 1))
    told = {name: values for name, _, values in of_site(folder / "site-0.yaml")}
    assert told["perfed_ledger_lines"]["asked"] == ledger.count('"event":"asked"') - 1
    assert ("perfed_own_round" in told) == report.startswith("{")


@pytest.mark.attack("disk-full-at-a-site")
def test_a_site_whose_disk_is_full_is_not_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_federation(tmp_path / "f", rounds=1)
    run(folder, desk(folder))
    assert health_of_site(folder / "site-0.yaml") == ""
    full = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert "no space is left" in health_of_site(folder / "site-0.yaml")


def assert_dashboard_asks_for(text: str) -> None:
    """Every metric that it names is served, with the labels that it shows."""
    labels = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for panel in json.loads(dashboard())["panels"]:
        for target in panel["targets"]:
            (metric,) = re.findall(r"perfed_\w+", target["expr"])
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert labels[metric] == shown, metric


def test_the_dashboard_has_what_grafana_demands() -> None:
    """By Grafana's own words: the required fields of Dashboard, Panel, GridPos and VariableModel in
    the package @grafana/schema, and that an import finds the source through a variable."""
    made = json.loads(dashboard())
    assert isinstance(made["schemaVersion"], int)
    assert 8 <= len(made["uid"]) <= 40
    (variable,) = made["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    panels = made["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] == "timeseries"
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        for one in (panel, *panel["targets"]):
            source = {"type": "prometheus", "uid": f"${{{variable['name']}}}"}
            assert one["datasource"] == source
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24  # columns of Grafana's grid
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells  # none covers another
        cells |= own
