"""Where the time of a recorded step goes, kernel by kernel, on a GPU.

    python benchmarks/profile_step.py --out benchmarks/results/profile_h200.json

The work is that of ``perfed bench``: ten clients, VGG11 with BatchNorm, bf16.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import perfed
from perfed.bench import OnlyTraining, paper_experiment
from perfed.core.message import Message
from perfed.engines.stacked.recorded import RecordedTraining
from perfed.runs.directory import environment
from perfed.runs.simulation import Simulation

STEPS = 50


def recorded_step() -> RecordedTraining:
    with tempfile.TemporaryDirectory() as folder:
        how = perfed.Execution(engine="stacked", precision="bf16")
        experiment = replace(paper_experiment(Path(folder)), algorithm=OnlyTraining(clusters=1))
        simulation = Simulation(experiment, how=how)
    population = simulation.population
    teacher = torch.full((len(population.public_x), 10), 0.1, device=simulation.device)
    messages = dict.fromkeys(simulation.select(0), Message(teacher=teacher))
    simulation.engine.perform([population.call("client_round", messages, 0)])
    recordings = simulation.engine.recordings.values()  # type: ignore[attr-defined]
    return next(one for one in recordings if isinstance(one, RecordedTraining))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    step = recorded_step()._recording.run
    step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    milliseconds = 1e3 * (time.perf_counter() - began) / STEPS
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in profiled.events():
        entry = kernels.setdefault(event.name[:90], [0.0, 0.0])
        entry[0] += event.device_time_total / 3
        entry[1] += 1 / 3
    rows = [
        {"kernel": name, "microseconds": micro, "calls": round(calls)}
        for name, (micro, calls) in sorted(kernels.items(), key=lambda item: -item[1][0])
    ]
    record = {
        "step_ms": milliseconds,
        "rows": rows,
        "environment": environment(torch.device("cuda")),
    }
    print(f"{milliseconds:.2f} ms a step")
    for row in rows[:30]:
        print(f"{row['microseconds']:9.1f} µs {row['calls']:4d}  {row['kernel']}")
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
