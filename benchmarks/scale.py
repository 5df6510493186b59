"""What a round costs when there are many clients, and when there are many machines.

    python benchmarks/scale.py --out benchmarks/results/scale.json      (about 5 minutes)

Many clients: the preset ``million`` with K = 1,000 to 10,000,000, a hundred clients a round. Memory
is that of a process for each size; for the time of a round all sizes take turns in one process.

Many machines: Ray's cluster utility starts one, two and four machines as processes here, the one
where the run is started without a core for workers. Training is *simulated*: a client sleeps, so
that two cores can stand for many. What is measured is what comes on top of it.

The model at the end is arithmetic on these measurements and on the assumptions it names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import perfed
from perfed.algorithms.fedavg import FedAvg
from perfed.core.algorithm import Client, weighted_average
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.threads import cpu_threads
from perfed.core.tree import Weights
from perfed.engines.base import Outcome
from perfed.engines.ray.bank import Share
from perfed.engines.ray.parcel import pack, unpack
from perfed.runs.directory import environment
from perfed.runs.simulation import Simulation

SIZES = (1_000, 100_000, 1_000_000, 10_000_000)
ROUNDS = 30
MACHINES = (1, 2, 4)
SELECTED = 16
TRAINING_SECONDS = 0.25
ASSUMED = {
    "machines": 1_000,
    "clients": 10_000_000,
    "selected": 10_000,
    "training_seconds": 1.0,
    "parameters": 1_000_000,
    "bytes_per_second": 1.25e9,
}
"""A round that is asked about: ten clients a machine, one model of a million parameters, and a
network of 10 Gbit/s at the machine where the run is started."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sleeping(FedAvg):
    """FedAvg whose clients sleep before they train, as if that took so long."""

    seconds: float = option(0.0, "how long")
    until: str = option("", "a file that round 2 waits for")

    def label(self) -> str:
        return "sleeping"  # in all runs that are compared

    def client_round(self, client: Client, message: Message) -> Message:
        time.sleep(self.seconds)
        while client.round == 2 and self.until and not Path(self.until).exists():
            time.sleep(0.02)
        return super().client_round(client, message)


# Many clients.


def built(clients: int) -> Simulation:
    experiment = perfed.load("million", [f"clients={clients}", f"rounds={ROUNDS}"])
    assert isinstance(experiment, perfed.Experiment)
    return Simulation(experiment, how=perfed.Execution(device="cpu"))


def measure_memory(clients: int) -> dict[str, Any]:
    """In this process: build, play, evaluate, and look at the memory."""
    began = time.perf_counter()
    simulation, channel = built(clients), Channel()
    seconds = time.perf_counter() - began
    with cpu_threads(1):
        simulation.begin(channel)
        for round in range(5):
            simulation.play_round(round, channel)
        simulation.population.evaluate(simulation.evaluation_messages(5), 5)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"clients": clients, "build_seconds": seconds, "peak_memory_gib": peak}


def round_ms() -> dict[int, float]:
    """In this process: populations of all sizes, which take turns, a round each."""
    simulations = {clients: built(clients) for clients in SIZES}
    seconds: dict[int, list[float]] = {clients: [] for clients in SIZES}
    channel = Channel()
    with cpu_threads(1):
        for simulation in simulations.values():
            simulation.begin(channel)
        for round in range(ROUNDS):
            for clients, simulation in simulations.items():
                began = time.perf_counter()
                simulation.play_round(round, channel)
                seconds[clients].append(time.perf_counter() - began)
    return {clients: 1e3 * statistics.median(found[5:]) for clients, found in seconds.items()}


# Many machines.


def measure_machines(machines: int) -> dict[str, Any]:
    """In this process: a cluster, and runs on it."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    head["_system_config"] = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = cluster.address
    cores = max(MACHINES) // machines
    nodes = [cluster.add_node(num_cpus=cores) for _ in range(machines)]
    cluster.wait_for_nodes()
    row: dict[str, Any] = {"machines": machines}
    try:
        with tempfile.TemporaryDirectory() as folder, perfed.engines.ray.session():
            path = Path(folder)
            row["round_seconds"] = timed(path / "timed", machines)
            row["sum"] = directory_sum(play(path / "alike", max(MACHINES)))
            if machines == max(MACHINES):
                calls = call_seconds(machines)
                row |= {"call_seconds": calls, **disturbed(cluster, nodes, path / "disturbed")}
    finally:
        cluster.shutdown()
    return row


def play(
    path: Path, workers: int, *callbacks: perfed.Callback, seconds: float = 0.05, until: str = ""
) -> Path:
    """A run whose data is gone before a worker starts: only who began it could read it."""
    file = path.with_suffix(".npz")
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (640, 1, 8, 8)).astype(np.uint8)
    np.savez(file, x=x, y=random.integers(0, 10, len(x)))
    values = {
        "rounds": 6,
        "clients": 2 * SELECTED,
        "clients_per_round": SELECTED,
        "evaluate_every": 6,
        "data": {"name": "npz", "path": str(file)},
        "partition": "iid",
        "models": ["mlp"],
        "algorithm": {
            "name": f"{Path(__file__).resolve()}:Sleeping",
            "seconds": seconds,
            "until": until,
        },
    }
    how = perfed.Execution(engine="ray", device="cpu", workers=workers, checkpoint_seconds=0.001)
    simulation = Simulation(perfed.Experiment(**values), callbacks, how)
    file.unlink()
    from perfed.runs.directory import RunDirectory

    return simulation.finish_in(RunDirectory.create(path)).path


def timed(path: Path, workers: int) -> float:
    """Seconds that clients take in a round, the median; the first ones make workers ready."""
    run = play(path, workers, seconds=TRAINING_SECONDS)
    lines = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    return statistics.median(line["clients"] for line in lines[2:])


def directory_sum(run: Path) -> str:
    """Of all that a run directory says but for times, machines and where the data was."""
    digest = hashlib.blake2b(digest_size=8)
    for name in ("rounds.jsonl", "clients.jsonl", "summary.json", "partition.json"):
        digest.update((run / name).read_bytes())
    for file in sorted((run / "models").iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class After(perfed.Callback):
    def __init__(self, round: int, what: Callable[[], Any]) -> None:
        self.round, self.what = round, what

    def on_round(self, report: Any) -> None:
        if report.round == self.round:
            self.what()


def disturbed(cluster: Any, nodes: list[Any], path: Path) -> dict[str, Any]:
    """A machine is lost in round 2, one joins after round 3; the sum is that of the others."""

    lost_by_now = path.with_suffix(".lost")

    def lose() -> None:
        cluster.remove_node(nodes[-1], allow_graceful=False)
        lost_by_now.touch()

    lost = After(1, lambda: threading.Timer(0.1, lose).start())
    joins = After(3, lambda: cluster.add_node(num_cpus=1))
    run = play(path, max(MACHINES), lost, joins, until=str(lost_by_now))
    return {"disturbed_sum": directory_sum(run)}


def call_seconds(workers: int) -> float:
    """What asking one worker and hearing from it costs where the run is started."""
    with perfed.engines.ray.session() as session:
        actors = [session.take(0.0) for _ in range(workers)]
        nothing = pack([])
        for actor in actors:
            session.answer(session.send(actor, "prepare", "cpu", perfed_float32(), torch.float32))
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            coming = [session.send(actor, "call", nothing) for _ in range(250) for actor in actors]
            for one in coming:
                session.answer(one)
            best = min(best, (time.perf_counter() - began) / len(coming))
        session.give(actors, 0.0)
    return best


def perfed_float32() -> Any:
    from perfed.engines.precision import FLOAT32

    return FLOAT32


def message_seconds(parameters: int, clients: int = 64) -> float:
    """What one client's messages cost where the run is started: packed, unpacked and merged."""
    messages = [
        Message(model=Weights({"weight": torch.rand(parameters)}, {})) for _ in range(clients)
    ]
    replies = {k: Outcome(message, True, {}, None, None) for k, message in enumerate(messages)}
    model = Weights({"weight": torch.rand(parameters)}, {})
    share = Share(0, "client_round", {k: Message(model=model) for k in range(clients)}, 0)
    seconds = []
    for _ in range(5):
        parcel = pack([replies])  # at the worker
        with cpu_threads(1):
            began = time.perf_counter()
            pack([share])
            (found,) = unpack(parcel, CPU)
            weighted_average([one.reply["model"] for one in found.values()], [1.0] * clients)
            seconds.append((time.perf_counter() - began) / clients)
    return min(seconds)


# The model.


def busiest(clients: int, machines: int, selected: int) -> float:
    """How many of the selected clients the machine with most of them has, on average: a client
    lives on one machine, and who is selected is drawn."""
    each = [len(part) for part in np.array_split(np.arange(clients), machines)]
    random = np.random.default_rng(0)
    drawn = random.multivariate_hypergeometric(each, selected, size=200, method="marginals")
    return float(drawn.max(axis=1).mean())


def modelled(
    clients: int,
    machines: int,
    selected: int,
    training: float,
    parameters: int,
    measured: dict[str, Any],
) -> dict[str, float]:
    """Seconds of a round by what takes them: training, and the rest where the run is started."""
    small, large = measured["message_seconds_small"], measured["message_seconds_large"]
    per_parameter = max(0.0, large - small) / 1_000_000
    return {
        "training": busiest(clients, machines, selected) * training,
        "calls": machines * measured["call_seconds"],
        "messages": selected * (small + parameters * per_parameter),
    }


def model(record: dict[str, Any]) -> dict[str, Any]:
    measured = record["measured"]
    checked = []
    for row in record["machines"]:
        parts = modelled(2 * SELECTED, row["machines"], SELECTED, TRAINING_SECONDS, 4_810, measured)
        checked.append({**row, "modelled_seconds": sum(parts.values())})
    a = ASSUMED
    clients, machines, selected = int(a["clients"]), int(a["machines"]), int(a["selected"])
    training, parameters = a["training_seconds"], int(a["parameters"])
    parts = modelled(clients, machines, selected, training, parameters, measured)
    parts["network"] = 4 * a["selected"] * a["parameters"] / a["bytes_per_second"]
    rows = {row["clients"]: row for row in record["clients"]}
    most, some = rows[10_000_000], rows[1_000]
    grown = (most["peak_memory_gib"] - some["peak_memory_gib"]) * 2**30
    return {
        "assumed": a,
        "checked": checked,
        "seconds": parts,
        "busiest": busiest(clients, machines, selected),
        "replies_gib": 4 * a["selected"] * a["parameters"] / 2**30,
        "bytes_per_client": grown / (most["clients"] - some["clients"]),
        "build_seconds": most["build_seconds"],
    }


def in_its_own_process(*arguments: str) -> Any:
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    row = json.loads(done.stdout.splitlines()[-1])
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--machines", type=int)
    arguments = parser.parse_args()
    if arguments.clients:
        print(json.dumps(measure_memory(arguments.clients)))
        return
    if arguments.machines:
        print(json.dumps(measure_machines(arguments.machines)))
        return
    clients = [in_its_own_process("--clients", str(k)) for k in SIZES]
    milliseconds = round_ms()
    clients = [row | {"round_ms": milliseconds[row["clients"]]} for row in clients]
    machines = [in_its_own_process("--machines", str(n)) for n in MACHINES]
    record = {
        "clients": clients,
        "round_ratio": milliseconds[1_000_000] / milliseconds[1_000],
        "rounds": ROUNDS,
        "machines": machines,
        "selected": SELECTED,
        "training_seconds": TRAINING_SECONDS,
        "measured": {
            "call_seconds": machines[-1]["call_seconds"],
            "message_seconds_small": message_seconds(4_810),
            "message_seconds_large": message_seconds(1_000_000, 16),
        },
        "environment": environment(CPU),
    }
    record["model"] = model(record)
    print(json.dumps(record["model"], indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
