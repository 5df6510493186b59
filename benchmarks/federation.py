"""What a round of a real federation costs: seconds, and bytes, as the channel counts them and as
they cross the sockets.

    python benchmarks/federation.py --out benchmarks/results/federation.json    (about 6 minutes)

Three sites on one machine, each a supernode of its own. A proxy stands before the superlink and
counts every byte to and from the supernodes; what crosses while nothing is asked of them
(heartbeats, looking for messages) is measured first. Needs ``perfed[flower]``.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from perfed.config import dump_yaml
from perfed.flower.certificates import write_certificates
from perfed.flower.initialise import APP
from perfed.runs.directory import environment

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.flower.processes import Network, free_port, network, wait_until

ROUNDS = 6  # the first of them is not counted: the sites fetch the app
IDLE_SECONDS = 20.0
SMALL = {"name": "mlp", "hidden": [32]}
LARGE = {"name": "mlp", "hidden": [1024, 1024]}
SETTINGS: list[dict[str, Any]] = [
    {"algorithm": {"name": "perfed-ckt", "clusters": 2}, "public": 400},
    {"algorithm": {"name": "perfed-ckt", "clusters": 2}, "public": 2000},
    {"algorithm": {"name": "perfed-ckt", "clusters": 2}, "public": 2000, "tls": True},
    {"algorithm": {"name": "fedavg"}, "public": 400, "model": LARGE},
]


class CountingProxy:
    """Passes every connection on, and counts."""

    def __init__(self, target: int) -> None:
        self.up = self.down = 0
        self._target = target
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", free_port()))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def counts(self) -> dict[str, int]:
        with self._lock:
            return {"up": self.up, "down": self.down}

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, sink, name in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pass, args=(source, sink, name), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, name: str) -> None:
        try:
            while data := source.recv(65536):
                with self._lock:
                    setattr(self, name, getattr(self, name) + len(data))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one side is gone
            source.close()
            sink.close()


def write_federation(folder: Path, setting: dict[str, Any]) -> None:
    images, labels = load_digits(return_X_y=True)
    x = (images * 15).astype(np.uint8).reshape(-1, 1, 8, 8)
    public = np.random.default_rng(0).integers(0, 256, (setting["public"], 1, 8, 8))
    np.savez(folder / "samples.npz", x=x, y=labels, public=public.astype(np.uint8))
    model = setting.get("model", SMALL)
    experiment = {
        "name": "bench",
        "rounds": ROUNDS,
        "clients": 3,
        "clients_per_round": 3,
        "evaluate_every": ROUNDS,  # a judgement by the server's model is not what is measured
        "models": [model],
        "algorithm": setting["algorithm"],
    }
    common = {"classes": 10, "public": "samples.npz"}
    (folder / "coordinator.yaml").write_text(dump_yaml({"experiment": experiment} | common))
    for client in range(3):
        data = {"name": "npz", "path": "samples.npz"}
        site = common | {"client": client, "run": "bench", "state": f"state-{client}"}
        site |= {"model": model, "alone": False, "device": "cpu"}
        site |= {"agrees": {"algorithms": [setting["algorithm"]["name"]]}}
        site |= {"data": {"dataset": data, "partition": "iid", "clients": 3}}
        (folder / f"site-{client}.yaml").write_text(dump_yaml(site))
    (folder / "app").mkdir()
    app = APP.format(coordinator=folder / "coordinator.yaml")
    (folder / "app" / "pyproject.toml").write_text(app)


def measure(folder: Path, setting: dict[str, Any]) -> dict[str, Any]:
    write_federation(folder, setting)
    certificates = folder / "certificates" if setting.get("tls") else None
    if certificates:
        write_certificates(certificates, 3, [])
    with network(folder / "net", certificates=certificates) as net:
        net.environment.pop("FLWR_SUPEREXEC_TASK_POLL_INTERVAL")  # as users have it
        superlink = net.superlink()
        proxy = CountingProxy(net.port)
        net.fleet_port = proxy.port
        nodes = start_sites(net, folder, certificates)
        wait_until(lambda: all("SuperNode ID" in node.text() for node in nodes), "three supernodes")
        time.sleep(3)
        before = proxy.counts()
        time.sleep(IDLE_SECONDS)
        idle = {
            name: (count - before[name]) / IDLE_SECONDS for name, count in proxy.counts().items()
        }
        run = net.run("run", folder / "app", folder / "coordinator.yaml")
        marks = watch(folder / "run" / "rounds.jsonl", proxy, run.ended)
        assert len(marks) == ROUNDS + 1 - (setting["algorithm"]["name"] == "fedavg"), run.text()
        assert not superlink.ended()
    lines = [json.loads(t) for t in (folder / "run" / "rounds.jsonl").read_text().splitlines()]
    timing = [json.loads(t) for t in (folder / "run" / "timing.jsonl").read_text().splitlines()]
    counted = range(1, ROUNDS - 1)  # without the first and the last, which is judged
    by_round = {line["round"]: (line, mark) for line, mark in zip(lines, marks, strict=True)}
    rows = []
    for round in counted:
        line, mark = by_round[round]
        earlier = by_round[round - 1][1]
        rows.append(
            {
                "round": round,
                "seconds": timing[round]["clients"],
                "channel_up": line["traffic"]["up_bytes"],
                "channel_down": line["traffic"]["down_bytes"],
                "socket_up": mark["up"] - earlier["up"],
                "socket_down": mark["down"] - earlier["down"],
                "between_marks": mark["time"] - earlier["time"],
            }
        )
    return {"setting": setting, "idle_bytes_per_second": idle, "rounds": rows}


def start_sites(net: Network, folder: Path, certificates: Path | None) -> list[Any]:
    nodes = []
    for client in range(3):
        more: list[str] = []
        if certificates:
            key = certificates / f"site-{client}"
            done = net.start("register", "flwr", "supernode", "register", f"{key}.pub", "loop")
            assert done.code() == 0, done.text()
            more = ["--root-certificates", str(certificates / "ca.crt")]
            more += ["--auth-supernode-private-key", str(key)]
        nodes.append(net.supernode(f"node-{client}", folder / f"site-{client}.yaml", *more))
    return nodes


def watch(path: Path, proxy: CountingProxy, ended: Any) -> list[dict[str, float]]:
    """The counts at the moment each line of ``rounds.jsonl`` appears."""
    marks: list[dict[str, float]] = []
    while True:
        over = ended() or (path.parent / "summary.json").is_file()
        lines = path.read_text().count("\n") if path.is_file() else 0
        marks += [proxy.counts() | {"time": time.monotonic()}] * (lines - len(marks))
        if over:
            return marks
        time.sleep(0.02)


def summary(record: dict[str, Any]) -> dict[str, Any]:
    rows, idle = record["rounds"], record["idle_bytes_per_second"]
    mean = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
    channel = mean["channel_up"] + mean["channel_down"]
    sockets = mean["socket_up"] + mean["socket_down"]
    idling = (idle["up"] + idle["down"]) * mean["between_marks"]
    return {
        "seconds": statistics.median(row["seconds"] for row in rows),
        "channel_bytes": channel,
        "socket_bytes": sockets,
        "idle_bytes": idling,
        "over_channel": sockets / channel - 1,
        "over_channel_without_idle": (sockets - idling) / channel - 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    records = []
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            record = measure(Path(folder), setting)
        record["summary"] = summary(record)
        print(json.dumps(record["setting"]), json.dumps(record["summary"]), flush=True)
        records.append(record)
    result = {"settings": records, "environment": environment(torch.device("cpu"))}
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
