"""Where the time of a recorded step goes, kernel by kernel, on a GPU.

    python benchmarks/profile_step.py --out benchmarks/results/profile_h200.json
    python benchmarks/profile_step.py --models resnet18 '{name: resnet18, norm: group}' vit

Ten clients, bf16. Without ``--models`` the work is that of ``perfed bench``: VGG11 with BatchNorm,
private and public samples. With them it is a step of FedAvg with 64 samples of each client.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.profiler import ProfilerActivity, profile

import perfed
from perfed.bench import OnlyTraining, paper_experiment
from perfed.config import Experiment
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.schema import from_mapping
from perfed.engines.stacked.recorded import RecordedTraining
from perfed.runs.directory import environment
from perfed.runs.simulation import Simulation

STEPS = 50
HOW = perfed.Execution(engine="stacked", precision="bf16")


def step_of_bench() -> RecordedTraining:
    with tempfile.TemporaryDirectory() as folder:
        experiment = replace(paper_experiment(Path(folder)), algorithm=OnlyTraining(clusters=1))
        simulation = Simulation(experiment, how=HOW)
    population = simulation.population
    teacher = torch.full((len(population.public_x), 10), 0.1, device=simulation.device)
    messages = dict.fromkeys(simulation.select(0), Message(teacher=teacher))
    simulation.engine.perform([population.call("client_round", messages, 0)])
    return recorded_training(simulation)


def step_of(model: str) -> RecordedTraining:
    with tempfile.TemporaryDirectory() as folder:
        settings = paper_experiment(Path(folder)).to_mapping()
        settings |= {"models": [yaml.safe_load(model)], "algorithm": {"name": "fedavg"}}
        simulation = Simulation(from_mapping(Experiment, settings), how=HOW)
    channel = Channel()
    simulation.begin(channel)
    simulation.play_round(0, channel)
    return recorded_training(simulation)


def recorded_training(simulation: Simulation) -> RecordedTraining:
    recordings = simulation.engine.recordings.values()  # type: ignore[attr-defined]
    return next(one for one in recordings if isinstance(one, RecordedTraining))


def profiled(step: Callable[[], None]) -> dict[str, Any]:
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    milliseconds = 1e3 * (time.perf_counter() - began) / STEPS
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in found.events():
        entry = kernels.setdefault(event.name[:90], [0.0, 0.0])
        entry[0] += event.device_time_total / 3
        entry[1] += 1 / 3
    rows = [
        {"kernel": name, "microseconds": micro, "calls": round(calls)}
        for name, (micro, calls) in sorted(kernels.items(), key=lambda item: -item[1][0])
    ]
    return {"step_ms": milliseconds, "rows": rows}


def show(name: str, record: dict[str, Any]) -> None:
    print(f"{name}: {record['step_ms']:.2f} ms a step")
    for row in record["rows"][:30]:
        print(f"{row['microseconds']:9.1f} µs {row['calls']:4d}  {row['kernel']}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine = {"environment": environment(torch.device("cuda"))}
    if arguments.models:
        record: dict[str, Any] = {"networks": {}} | machine
        for model in arguments.models:
            record["networks"][model] = profiled(step_of(model)._recording.run)
            show(model, record["networks"][model])
    else:
        record = profiled(step_of_bench()._recording.run) | machine
        show("vgg11-bn", record)
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
