"""The engines on the same work, in one run: how fast, and how far from the machine's limit.

On a CPU the work is the embedded default. On a GPU it is the paper's: ten clients with VGG11 and
BatchNorm, 64 private and 128 public samples a step, on images made up of noise, since what they
show does not matter for the time.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.config import Comparison, Experiment, load
from perfed.core.algorithm import Client
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.pixels import numbers
from perfed.core.schema import from_mapping
from perfed.core.threads import cpu_threads
from perfed.engines import Execution
from perfed.engines.execution import fitting_threads
from perfed.engines.precision import PRECISIONS
from perfed.runs.directory import environment
from perfed.runs.simulation import Simulation

PAPER_WORK: dict[str, Any] = {
    "name": "vgg11-bn",
    "rounds": 1,
    "clients": 20,
    "clients_per_round": 10,
    "partition": "iid",
    "models": ["vgg11-bn"],
    "training": {"learning_rate": 0.001, "steps": 50, "batch_size": 64, "public_batch_size": 128},
    "algorithm": {"name": "perfed-ckt", "clusters": 3},
}
REPEATS = 5


@dataclass(frozen=True)
class Contender:
    engine: str
    precision: str
    steps: int
    """How many steps are timed at once."""


class OnlyTraining(PerFedCKT):
    """The training of a round of PerFed-CKT, with the teacher that comes, and nothing kept."""

    def client_round(self, client: Client, message: Message) -> Message:
        client.sgd(client.weights, self.objective, message["teacher"])
        return Message()


def bench(device: str = "auto") -> dict[str, Any]:
    """Time every engine; the result can be written as JSON."""
    found = Execution(device=device).torch_device()
    with tempfile.TemporaryDirectory() as folder:
        if found.type == "cuda":
            experiment = paper_experiment(Path(folder))
            contenders = [
                Contender("sequential", "float32", 5),
                Contender("sequential", "bf16", 5),
                Contender("stacked", "float32", 50),
                Contender("stacked", "bf16", 50),
            ]
        else:
            experiment = default_experiment()
            contenders = [
                Contender("sequential", "float32", experiment.training.steps),
                Contender("stacked", "float32", experiment.training.steps),
            ]
            if has_ray():
                contenders.append(Contender("ray", "float32", experiment.training.steps))
        return {
            "work": experiment.to_mapping(),
            "environment": environment(found),
            "rows": compare_engines(experiment, contenders, found),
            "peak_flops": peak_flops(found),
        }


def has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def default_experiment() -> Experiment:
    chosen = ["algorithm={name: perfed-ckt, clusters: 3, weight: 1.0}"]
    experiment = load(None, chosen)
    return experiment.experiments()[0] if isinstance(experiment, Comparison) else experiment


def paper_experiment(folder: Path) -> Experiment:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (6000, 3, 32, 32), dtype=np.uint8)
    file = folder / "noise.npz"
    np.savez(file, x=images[:4000], y=random.integers(0, 10, 4000), public=images[4000:])
    return from_mapping(Experiment, PAPER_WORK | {"data": {"name": "npz", "path": str(file)}})


def compare_engines(
    experiment: Experiment, contenders: Sequence[Contender], device: torch.device
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for contender in contenders:
        training = replace(experiment.training, steps=contender.steps)
        how = from_mapping(
            Execution,
            {
                "engine": contender.engine,
                "precision": contender.precision,
                "device": str(device),
            },
        )
        work = replace(experiment, training=training)
        with how.several_runs():
            row = measured(replace(work, algorithm=OnlyTraining(clusters=1)), how, time_training)
            if device.type == "cpu":
                row |= measured(work, how, time_round)
        rows.append(row)
    # Against the fastest way of running clients one after another.
    sequential = min(row["step_ms"] for row in rows if row["engine"] == "sequential")
    for row in rows:
        row["step_ratio"] = sequential / row["step_ms"]
        if "round_ms" in rows[0]:
            row["round_ratio"] = rows[0]["round_ms"] / row["round_ms"]
    return rows


def measured(
    experiment: Experiment, how: Execution, measure: Callable[[Simulation], dict[str, Any]]
) -> dict[str, Any]:
    simulation = Simulation(experiment, how=how)
    try:
        with cpu_threads(fitting_threads(simulation.population)):
            return simulation.engine.facts() | measure(simulation)
    finally:
        simulation.engine.close()


def time_training(simulation: Simulation) -> dict[str, Any]:
    """One SGD step of all clients of a round, and nothing else; the algorithm is OnlyTraining."""
    population, experiment = simulation.population, simulation.experiment
    teacher = torch.full((len(population.public_x), population.classes), 1 / population.classes)
    message = Message(teacher=teacher.to(population.device))
    clients = simulation.select(0)

    def work() -> None:
        simulation.engine.perform(
            [population.call("client_round", dict.fromkeys(clients, message), 0)]
        )

    repeats = REPEATS if population.device.type == "cuda" else 4 * REPEATS  # a CPU is disturbed
    warm_up, seconds = timed(work, population.device, repeats)
    training = experiment.training
    samples = len(clients) * (training.batch_size + training.public_batch_size)
    flops = sum(flops_of_step(simulation, client) for client in clients)
    step = seconds / training.steps
    return {
        "clients": len(clients),
        "step_ms": 1e3 * step,
        "samples_per_second": samples / step,
        "flops_per_step": flops,
        "flops_per_second": flops / step,
        "first_time_seconds": warm_up,
    }


def time_round(simulation: Simulation) -> dict[str, Any]:
    """A whole round with its evaluation."""
    channel = Channel()
    simulation.begin(channel)
    number = iter(range(1_000_000))

    def work() -> None:
        round = next(number)
        simulation.play_round(round, channel)
        simulation.population.evaluate(simulation.evaluation_messages(round), round)

    _, seconds = timed(work, simulation.device, repeats=4 * REPEATS)
    return {"round_ms": 1e3 * seconds}


def timed(
    work: Callable[[], None], device: torch.device, repeats: int = REPEATS
) -> tuple[float, float]:
    """Seconds of the first time, and the median of the others."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    first = once()
    return first, statistics.median(once() for _ in range(repeats))


def flops_of_step(simulation: Simulation, client: int) -> float:
    """Forward, and twice that backward, for one client's private and public samples."""
    population = simulation.population
    module = population.modules[population.architectures[client]].eval()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module(numbers(population.x[:1]))
    training = simulation.experiment.training
    samples = training.batch_size + training.public_batch_size
    return float(3 * counter.get_total_flops() * samples)


def peak_flops(device: torch.device) -> dict[str, float]:
    """What a large matrix product reaches here, the floor's denominator."""
    size = 8192 if device.type == "cuda" else 2048
    dtypes = {"float32": torch.float32}
    if device.type == "cuda":
        dtypes |= {"tf32": torch.float32, "bf16": torch.bfloat16}
    rates = {}
    for name, dtype in dtypes.items():
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

        def product(left: Tensor = left, right: Tensor = right) -> None:
            torch.mm(left, right)

        with PRECISIONS[name].active(device):
            rates[name] = 2 * size**3 / timed(product, device, repeats=20)[1]
    return rates


def render(result: dict[str, Any]) -> str:
    """A table for people."""
    machine, rounds = result["environment"], "round_ms" in result["rows"][0]
    lines = [
        f"{result['work']['name']}: {result['rows'][0]['clients']} clients a step, "
        f"{machine['device']}, {machine['cores']} cores, torch {machine['packages'].get('torch')}",
        "",
        f"{'engine':<12}{'precision':<11}{'ms a step':>10}{'ratio':>8}{'samples/s':>12}"
        f"{'GFLOP/s':>10}{'floor, ms':>11}" + (f"{'ms a round':>12}{'ratio':>8}" if rounds else ""),
    ]
    for row in result["rows"]:
        name = row["engine"] + (f" ×{row['workers']}" if "workers" in row else "")
        floor = 1e3 * row["flops_per_step"] / result["peak_flops"][row["precision"]]
        lines.append(
            f"{name:<12}{row['precision']:<11}{row['step_ms']:>10.2f}"
            f"{row['step_ratio']:>7.1f}×{row['samples_per_second']:>12,.0f}"
            f"{row['flops_per_second'] / 1e9:>10,.0f}{floor:>11.2f}"
            + (f"{row['round_ms']:>12.0f}{row['round_ratio']:>7.1f}×" if rounds else "")
        )
    lines.append("\nfloor: the step's arithmetic at the rate of a large matrix product here")
    if rounds:
        lines.append("round: training, soft decisions, clustering, evaluation of all clients")
    if any("workers" in row for row in result["rows"]):
        lines.append("×N: on N workers, each a process with one thread")
    return "\n".join(lines)
