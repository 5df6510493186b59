"""Files that ``perfed federation init`` writes to run a federation for months: systemd's units, a
Dockerfile, a composition of containers, and a dashboard for Grafana."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

UNIT = """\
# {what}. Copy it to /etc/systemd/system, then: systemctl enable --now {name}
[Unit]
Description={what}
After=network-online.target
Wants=network-online.target

[Service]
User=perfed
WorkingDirectory={folder}
ExecStart={program} {words}
Restart=always
RestartSec=5
# It writes in its own folder alone, and gains no rights.
NoNewPrivileges=true
ProtectSystem=strict
ReadWritePaths={folder}
PrivateTmp=true

[Install]
WantedBy=multi-user.target
"""
PLACE = "/srv/perfed"
PROGRAM = f"{PLACE}/venv/bin/perfed"
UNITS = {
    "perfed-coordinator.service": (
        "The coordinator of a perfed federation",
        f"{PLACE}/coordinator",
        "federation serve",
    ),
    "perfed-site.service": ("A site of a perfed federation", f"{PLACE}/site", "site start ."),
}

DOCKERFILE = """\
# perfed and Flower, for a coordinator or a site, whose folder is mounted.
FROM python:3.11-slim
# perfed is not on PyPI: put its wheel ('python -m build' in its source tree) beside this file.
COPY perfed-{version}-py3-none-any.whl /tmp/
RUN pip install --no-cache-dir '/tmp/perfed-{version}-py3-none-any.whl[flower,metrics]' \\
 && useradd --create-home --uid 10001 perfed
USER 10001
# Whoever owns the mounted folder is the user (--user), and has no home here.
ENV HOME=/tmp USER=perfed
WORKDIR /federation
ENTRYPOINT ["perfed"]
CMD ["federation", "serve"]
"""

COMPOSE = """\
# The coordinator: 'docker compose up --build --detach' in this folder, then
# docker compose exec coordinator perfed federation start
# A site has a folder of its own, in which its kit was unpacked; 'docker build --tag perfed .' here
# makes an image for it; there:
# docker run --user "$(id -u):$(id -g)" --volume "$PWD:/federation" perfed site start .
name: perfed
services:
  coordinator:
    build: .
    user: '{user}'  # who has written this folder: its keys are for nobody else
    working_dir: {folder}
    volumes:  # at the same place: the app and flwr-home name it
      - type: bind
        source: ..
        target: {folder}
    ports:
      - '0.0.0.0:8443:8443'  # sites come in from anywhere, with a registered key
    command: ["federation", "serve"]
    restart: unless-stopped
    healthcheck:
      test: ["CMD", "perfed", "federation", "status"]
      interval: 60s
      timeout: 30s
"""


def write_services(folder: Path, coordinator: Path) -> None:
    """Into a new folder; the coordinator's will be at ``coordinator``."""
    from perfed import __version__

    folder.mkdir()
    for name, (what, place, words) in UNITS.items():
        text = UNIT.format(what=what, name=name, folder=place, program=PROGRAM, words=words)
        (folder / name).write_text(text, "utf-8")
    (folder / "Dockerfile").write_text(DOCKERFILE.format(version=__version__), "utf-8")
    (folder / "grafana.json").write_text(dashboard(), "utf-8")
    place = json.dumps(str(coordinator))  # a path may have any character: quoted
    (folder / "compose.yaml").write_text(COMPOSE.format(user=_user(), folder=place), "utf-8")


def _user() -> str:
    """Of this process, as Docker has it; Windows has no such numbers."""
    return f"{os.getuid()}:{os.getgid()}" if hasattr(os, "getuid") else "10001:10001"


PANELS = (
    ("Is it well?", "perfed_run_well", "bool_yes_no"),
    ("Rounds done", "perfed_rounds_done", "none"),
    ("Time since the newest round", "time() - perfed_newest_round_seconds", "s"),
    ("Accuracy", "perfed_accuracy", "percentunit"),
    ("Accuracy of each site", "perfed_site_accuracy", "percentunit"),
    ("Time since each site was seen", "time() - perfed_site_seen_seconds", "s"),
    ("Refused answers of each site", "perfed_site_refused", "none"),
    ("Bytes in messages", "perfed_message_bytes", "bytes"),
)
"""Title, what Prometheus is asked, and Grafana's name of the unit."""


def dashboard() -> str:
    """For Grafana: a panel per number, with Prometheus as its source."""
    return json.dumps(
        {
            "title": "perfed federation",
            "uid": "perfed-federation",
            "schemaVersion": 39,
            "refresh": "10s",
            "time": {"from": "now-6h", "to": "now"},
            "templating": {
                "list": [{"name": "source", "type": "datasource", "query": "prometheus"}]
            },
            "panels": [_panel(number, *panel) for number, panel in enumerate(PANELS)],
        },
        indent=1,
    )


def _panel(number: int, title: str, query: str, unit: str) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    legend = "site {{client}}" if "perfed_site_" in query else title
    target = {"refId": "A", "expr": query, "legendFormat": legend, "datasource": source}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"x": 12 * (number % 2), "y": 8 * (number // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [target],
    }
