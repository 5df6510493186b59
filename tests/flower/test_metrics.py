"""What Prometheus sees: parsed by its own client, and compared with the run's files."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from perfed.flower.installing import dashboard
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
        state, told = look(folder / "run"), numbers(fetched(ports[0], "/metrics")[1])
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
        (folder / "state-1" / "ledger.jsonl").write_text("\n".join(ledger[1:]) + "\n")
        assert fetched(ports[1], "/health")[0] == 503  # somebody has changed the ledger
    finally:
        for process in started:
            os.kill(process.pid, signal.SIGTERM)
            process.wait(60)
    asked = json.dumps(json.loads(dashboard())["panels"])
    known = {name for name, _ in told}
    for word in ("perfed_run_well", "perfed_rounds_done", "perfed_site_accuracy"):
        assert word in asked
        assert word in known
