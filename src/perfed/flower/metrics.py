"""Health and numbers of a coordinator's run or of a site, for Prometheus: from files alone, so
they are also told while nobody is at work.

    /health   200 where all is well, else 503, and one line that says why
    /metrics  in Prometheus' format
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from perfed.core.errors import ConfigError, PerfedError
from perfed.flower.backup import state_of
from perfed.flower.ledger import ASKED, LEFT, REFUSED, Ledger
from perfed.flower.overview import look
from perfed.flower.site import REPORT

PATIENCE = 10.0  # seconds that a request may be silent
LEAST_FREE = 2**20  # bytes on the disk, with which a site can still write its ledger

Numbers = list[tuple[str, str, dict[str, float]]]
"""Name, meaning, and values by label: the client's number at a coordinator, the event at a site."""


def of_run(path: Path) -> Numbers:
    run = look(path)
    sites = {str(site.client): site for site in run.sites}
    alone: Numbers = [
        ("perfed_run_well", "1 where the run is at work or finished", {"": float(run.well)}),
        ("perfed_rounds_done", "Rounds that are done", {"": run.rounds_done}),
        ("perfed_rounds", "Rounds that the run has", {"": run.rounds}),
        (
            "perfed_newest_round_seconds",
            "When the newest round ended (Unix time)",
            {"": run.newest},
        ),
        ("perfed_message_bytes", "Bytes in messages, up and down", {"": run.bytes}),
        ("perfed_sites_kept_out", "Nodes that may not join", {"": len(run.kept_out)}),
    ]
    if run.accuracy is not None:
        alone.append(("perfed_accuracy", "Mean test accuracy, 0 to 1", {"": run.accuracy}))
    if run.epsilon is not None:
        alone.append(("perfed_epsilon", "Privacy that is spent", {"": run.epsilon}))
    by_site: Numbers = [
        (
            "perfed_site_seen_seconds",
            "When a site was last connected (Unix time)",
            {name: site.seen for name, site in sites.items() if site.seen is not None},
        ),
        (
            "perfed_site_rounds",
            "Rounds in which a site's answer was admitted",
            {name: site.rounds for name, site in sites.items()},
        ),
        (
            "perfed_site_refused",
            "Answers of a site that were refused",
            {name: site.refused for name, site in sites.items()},
        ),
        (
            "perfed_site_accuracy",
            "Test accuracy that a site told, 0 to 1",
            {name: site.accuracy for name, site in sites.items() if site.accuracy is not None},
        ),
    ]
    return alone + by_site


def of_site(path: Path) -> Numbers:
    state = state_of(path)
    lines, newest = Ledger(state).read(), state / "ledger.jsonl"
    counts = dict.fromkeys((ASKED, LEFT, REFUSED), 0.0)
    for entry in lines.entries:
        event = entry.get("event")
        if isinstance(event, str) and event in counts:  # anybody may have changed it
            counts[event] += 1
    made: Numbers = [("perfed_ledger_lines", "Lines of the ledger by event", counts)]
    if newest.is_file():
        when = {"": newest.stat().st_mtime}
        made.append(("perfed_newest_task_seconds", "When it was last asked (Unix time)", when))
    reports = sorted(state.glob(f"*/{REPORT}"), key=lambda report: report.stat().st_mtime)
    for report in reports[-1:]:
        last = _newest_line(report)
        for name in ("test_accuracy", "alone_test_accuracy", "round"):
            if name in last:
                made.append((f"perfed_own_{name}", "In the site's newest report", {"": last[name]}))
    return made


def _newest_line(report: Path) -> dict[str, Any]:
    """A site that is killed, or whose disk is full, leaves a part of a line."""
    for line in reversed(report.read_text("utf-8", "replace").splitlines()):
        with suppress(ValueError):
            values = json.loads(line)
            if isinstance(values, dict):
                return values
    return {}


def health_of_run(path: Path) -> str:
    """Why it is not well; empty where it is."""
    run = look(path)
    return "" if run.well else f"nobody is at work: {run.failure or run.state}"


def health_of_site(path: Path) -> str:
    """A site that can write its ledger and read its files is well."""
    state = state_of(path)
    ledger = Ledger(state)
    ledger.read().check(ledger.path)
    if shutil.disk_usage(state).free < LEAST_FREE:
        return f"no space is left in {state}: the site answers nothing"
    return ""


class _Scraped(Collector):
    def __init__(self, numbers: Callable[[], Numbers], label: str) -> None:
        self._numbers, self._label = numbers, label

    def collect(self) -> Iterable[GaugeMetricFamily]:
        try:
            numbers = self._numbers()
        except PerfedError:  # before the first round there is nothing
            numbers = []
        for name, meaning, values in numbers:
            labelled = "" not in values
            family = GaugeMetricFamily(name, meaning, labels=[self._label] if labelled else [])
            for label, value in values.items():
                family.add_metric([label] if labelled else [], value)
            yield family


def application(numbers: Callable[[], Numbers], health: Callable[[], str], label: str) -> Any:
    registry = CollectorRegistry()
    registry.register(_Scraped(numbers, label))
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: Any) -> Any:
        if environ["PATH_INFO"] == "/metrics":
            return metrics(environ, start)
        if environ["PATH_INFO"] != "/health":
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"/health or /metrics\n"]
        try:
            why = health()
        except PerfedError as error:
            why = str(error)
        code = "503 Service Unavailable" if why else "200 OK"
        start(code, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{why or 'well'}\n".encode()]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    """A connection that says nothing must not keep Prometheus waiting."""

    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, format: str, *args: Any) -> None:
        pass


def serve(app: Any, host: str, port: int) -> None:
    """Until it is stopped."""
    try:
        server = make_server(host, port, app, _Server, _Quiet)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}", "--port") from None
    with server:
        print(f"http://{host}:{server.server_port}/metrics and /health", flush=True)
        server.serve_forever()
