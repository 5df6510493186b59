"""Networks × engines × precisions: milliseconds of one training step of ten clients, FedAvg.

    python benchmarks/networks.py --out benchmarks/results/networks_cpu.json
    python benchmarks/networks.py --device cuda --out benchmarks/results/networks_h200.json

Ten clients, 64 samples each, on pictures of noise (3×32×32, if nothing else is said): what they
show does not matter for the time. The ways to run a network take turns, so that all of them meet
the same machine. The record is written anew after each network. Beside the times stands the floor:
the step's arithmetic at the rate that a large matrix product reaches in the same run. On two quiet
cores all of it takes some ten minutes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from perfed.bench import peak_flops
from perfed.config import Experiment
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.schema import from_mapping
from perfed.core.threads import cpu_threads
from perfed.engines import Execution
from perfed.engines.execution import fitting_threads
from perfed.models import parameter_count
from perfed.runs.directory import environment
from perfed.runs.simulation import Simulation

CLIENTS, BATCH = 10, 64
CPU_WAYS = (("sequential", "float32"), ("stacked", "float32"))
GPU_WAYS = tuple(
    (engine, precision)
    for precision in ("float32", "tf32", "bf16")
    for engine in ("sequential", "stacked")
)


DROPOUT_CNN = Path(__file__).with_name("peers") / "networks.py:DropoutCnn"


@dataclass(frozen=True)
class Network:
    title: str
    models: Any
    shape: tuple[int, ...] = (3, 32, 32)
    cpu_steps: int = 1
    """Steps that are timed at once on a CPU. One of ten large networks is ten calls: enough to have
    a tape."""


NETWORKS = {
    "mlp": Network("MLP, 64 hidden, 8×8", {"name": "mlp"}, (1, 8, 8), 200),
    "cnn4": Network("CNN, two 5×5 convolutions, 28×28", {"name": "cnn4"}, (1, 28, 28), 10),
    "dropout": Network("CNN with dropout", str(DROPOUT_CNN), cpu_steps=3),
    "vgg11": Network("VGG11", {"name": "vgg11"}),
    "vgg11-bn": Network("VGG11, BatchNorm", {"name": "vgg11-bn"}),
    "resnet18": Network("ResNet18, BatchNorm", {"name": "resnet18"}),
    "resnet18-gn": Network("ResNet18, GroupNorm", {"name": "resnet18", "norm": "group"}),
    "mobilenet-v2": Network("MobileNetV2", {"name": "mobilenet-v2"}),
    "googlenet": Network("GoogLeNet", {"name": "googlenet"}, cpu_steps=1),
    "vit": Network("ViT, 6 blocks of width 192", {"name": "vit"}),
}


def experiment(network: Network, folder: Path, steps: int) -> Experiment:
    random = np.random.default_rng(0)
    file = folder / "noise.npz"
    images = random.normal(size=(40 * CLIENTS, *network.shape)).astype(np.float32)
    np.savez(file, x=images, y=random.integers(0, 10, len(images)))
    work = {
        "name": "networks",
        "rounds": 1,
        "clients": CLIENTS,
        "clients_per_round": CLIENTS,
        "partition": "iid",
        "data": {"name": "npz", "path": str(file), "layout": "CHW"},
        "models": {"architectures": [network.models]},
        "training": {"learning_rate": 0.001, "steps": steps, "batch_size": BATCH},
        "algorithm": {"name": "fedavg"},
    }
    return from_mapping(Experiment, work)


class Way:
    """One engine in one precision, ready to train the clients again and again."""

    def __init__(self, network: Network, engine: str, precision: str, device: torch.device) -> None:
        self.engine, self.precision, self.device = engine, precision, device
        on_gpu = device.type == "cuda"
        self.steps = _gpu_steps(engine, precision) if on_gpu else network.cpu_steps
        how = from_mapping(
            Execution, {"engine": engine, "precision": precision, "device": str(device)}
        )
        with tempfile.TemporaryDirectory() as folder:
            self.simulation = Simulation(experiment(network, Path(folder), self.steps), how=how)
        self.simulation.begin(Channel())
        (weights,) = self.simulation.progress.state.values()
        self._messages = dict.fromkeys(range(CLIENTS), Message(model=weights))
        self.finite = True

    def step_seconds(self) -> tuple[float, float]:
        """Wall-clock and CPU seconds of one step."""
        population = self.simulation.population
        began = time.perf_counter(), time.process_time()
        with cpu_threads(fitting_threads(population)):
            (outcomes,) = self.simulation.engine.perform(
                [population.call("client_round", self._messages, 0)]
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        ended = time.perf_counter(), time.process_time()
        self.finite &= all(outcome.broken_reply is None for outcome in outcomes.values())
        wall, cpu = ((b - a) / self.steps for a, b in zip(began, ended, strict=True))
        return wall, cpu

    def warm_up(self) -> float:
        """Seconds until everything is compiled and recorded."""
        began = time.perf_counter()
        self.step_seconds()
        return time.perf_counter() - began


def _gpu_steps(engine: str, precision: str) -> int:
    """Fewer where each takes long."""
    return 5 if engine == "sequential" else 50 if precision == "bf16" else 10


def measured(
    network: Network, ways: Sequence[tuple[str, str]], device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """A row for each way; where one fails, why."""
    rows: list[dict[str, Any]] = []
    ready: list[tuple[Way, dict[str, Any]]] = []
    for engine, precision in ways:
        row: dict[str, Any] = {"engine": engine, "precision": precision}
        rows.append(row)

        def prepare(engine: str = engine, precision: str = precision) -> tuple[Way, float]:
            way = Way(network, engine, precision, device)
            return way, way.warm_up()

        prepared = _tried(prepare, row)
        if prepared is not None:
            row["first_time_seconds"] = prepared[1]
            ready.append((prepared[0], row))
    times: list[list[tuple[float, float]]] = [[] for _ in ready]
    for _ in range(repeats):
        for (way, row), own in zip(ready, times, strict=True):
            seconds = _tried(way.step_seconds, row)
            own += [] if seconds is None else [seconds]
    for (way, row), own in zip(ready, times, strict=True):
        if own:
            row["step_ms"] = 1e3 * statistics.median(wall for wall, _ in own)
            row["cpu_ms"] = 1e3 * statistics.median(cpu for _, cpu in own)
            row["finite"] = way.finite
        way.simulation.engine.close()
    return rows


def _tried(work: Callable[[], Any], row: dict[str, Any]) -> Any:
    try:
        return work()
    except Exception as error:  # a table with a hole says more than no table
        row["error"] = f"{type(error).__name__}: {error}".split("\n")[0]
        return None


def facts(network: Network) -> dict[str, Any]:
    """How large it is, and what one step of all clients computes: backward is twice forward."""
    with tempfile.TemporaryDirectory() as folder:
        built = Simulation(experiment(network, Path(folder), 1), how=Execution(device="cpu"))
    (module,) = built.population.modules.values()
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        module.eval()(built.population.x[:1])
    return {
        "title": network.title,
        "parameters": parameter_count(module),
        "shape": list(network.shape),
        "flops_per_step": float(3 * counter.get_total_flops() * CLIENTS * BATCH),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--engines", nargs="+", default=["sequential", "stacked"])
    parser.add_argument("--precisions", nargs="+", default=["float32", "tf32", "bf16"])
    parser.add_argument("--repeats", type=int, help="default: 3 on a CPU, 5 on a GPU")
    arguments = parser.parse_args()
    device = Execution(device=arguments.device).torch_device()
    ways = [
        way
        for way in (CPU_WAYS if device.type == "cpu" else GPU_WAYS)
        if way[0] in arguments.engines and way[1] in arguments.precisions
    ]
    repeats = arguments.repeats or (3 if device.type == "cpu" else 5)
    record: dict[str, Any] = {
        "clients": CLIENTS,
        "batch": BATCH,
        "environment": environment(device),
        "peak_flops": peak_flops(device),
        "networks": {},
    }
    if arguments.out and arguments.out.is_file():  # some networks anew, the others as they were
        old = json.loads(arguments.out.read_text("utf-8"))
        record["networks"] = old["networks"]
    for name in arguments.networks:
        rows = measured(NETWORKS[name], ways, device, repeats)
        machine = record["environment"]["started"]
        record["networks"][name] = facts(NETWORKS[name]) | {"rows": rows, "measured": machine}
        work = record["networks"][name]["flops_per_step"]
        for row in rows:
            floor = 1e3 * work / record["peak_flops"][row["precision"]]
            shown = f"{row['step_ms']:10.2f} ms" if "step_ms" in row else f"  {row.get('error')}"
            shown += "" if row.get("finite", True) else "  not finite"
            print(
                f"{name:14}{row['engine']:12}{row['precision']:9}{shown}  floor {floor:.2f} ms",
                flush=True,
            )
        if arguments.out:
            arguments.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
