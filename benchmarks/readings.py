"""Is there a reading of the paper under which its numbers come out?

    python benchmarks/readings.py --precision bf16 --seconds 600      (a GPU: a minute a reading)
    python benchmarks/readings.py --after --precision bf16            (a GPU: some minutes)
    python benchmarks/readings.py --quick                             (digits: a minute on a CPU)

The paper says 64.0 for local training, 70.7 for PerFed-CKT with one cluster and 74.3 with three.
Its text leaves open how clients are selected, what the mean is over, which VGG11 it is, and more.
Each reading that it allows is run with these three methods, for fewer rounds than the paper has. It
goes on where it was stopped. ``--after`` looks at runs once more when they are over: what clients'
best rounds would give, and BatchNorm with the statistics of what it sees. ``python
benchmarks/render.py`` makes the table of docs/reproduction.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from committed import RESULTS
from torch import nn

import perfed
from perfed.cli.display import conducting
from perfed.config import Experiment
from perfed.core.schema import from_mapping
from perfed.core.tensorfile import write_atomically
from perfed.data import Federation
from perfed.engines import Execution
from perfed.paper.published import WEIGHT
from perfed.paper.tables import TableRun, table_run, with_options
from perfed.runs.study import Record, Study

FOLDER = RESULTS / "readings"
METHODS = ("local", "perfed-ckt-1", "perfed-ckt-3")
ROUNDS, SEEDS, FRACTION = 50, (0, 1), 0.1
BATCH = 128  # public samples of a step

Changes = Mapping[str, Any]
READINGS: Mapping[str, Changes] = {
    "as everywhere on this page": {},
    "clients selected by size, as in Algorithm 1; those never selected stay untrained": {
        "selection": "by-size",
        "local": {"participation": "selected"},
    },
    "no repair: clients with too few samples are left out": {
        "partition": {"repair": False},
        "local": {"participation": "selected"},
    },
    "VGG11 without BatchNorm": {"models": {"architectures": ["vgg11"]}},
    "every client has its own initial weights": {"models": {"initial": "own"}},
    "public samples taken from CIFAR-10": {"data": {"public_from": "itself"}},
    "public batches move BatchNorm's statistics": {"training": {"public_batchnorm": "shared"}},
    "agreement summed over a mini-batch, not averaged": {"perfed-ckt": {"weight": WEIGHT * BATCH}},
}
"""What each changes in an experiment: keys of its sections, or options of an algorithm."""


def chosen(quick: bool) -> TableRun:
    if quick:
        return table_run(1, quick=True)
    run = table_run(1, quick=False)
    return with_options(run, "paper", rounds=ROUNDS, fractions=[FRACTION], seeds=SEEDS)


def changed(experiment: Experiment, changes: Changes) -> Experiment:
    """``experiment`` under another reading."""
    values = experiment.to_mapping()
    algorithm = values["algorithm"]
    for key, value in changes.items():
        if key == algorithm["name"]:
            algorithm.update(value)
        elif key in ("local", "perfed-ckt"):
            continue  # another method's
        elif isinstance(value, Mapping):
            values[key] = {**values[key], **value}
        else:
            values[key] = value
    if algorithm.get("participation") == "selected":  # it trains whom and when the others train
        values |= {"rounds": ROUNDS, "evaluate_every": ROUNDS // 10}
    return from_mapping(Experiment, values)


def study(folder: Path = FOLDER, quick: bool = False) -> Study:
    """All runs, reading by reading."""
    run = chosen(quick)
    fraction = run.fractions[0]
    return Study(
        folder,
        {
            run_name(number, method, seed): changed(
                run.experiment(run.methods[method], fraction, seed), changes
            )
            for number, changes in enumerate(READINGS.values())
            for method in METHODS
            for seed in run.seeds
            if not (quick and needs_pictures(changes))
        },
    )


LAST_ROUND = "last round"
BEST_ROUND = "best test round of the mean"
BEST_ROUNDS = "best test round of each client by itself"
TRAINING_MODE = "last round, BatchNorm in training mode"


def looked_at_after(
    folder: Path, quick: bool, how: Execution, seconds: float = float("inf")
) -> None:
    """What else the runs of the first reading say, evaluated in every round, with their models.
    They are not kept: the hundred models of a run with VGG11 take four gigabytes."""
    run, path, runs = chosen(quick), folder / "after.json", Path("runs", f"{folder.name}-after")
    folder.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + seconds
    found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    for method in METHODS:
        for seed in run.seeds:
            if f"{method}-seed{seed}" in found or time.monotonic() >= ends:
                continue
            plain = run.experiment(run.methods[method], run.fractions[0], seed)
            experiment = dataclasses.replace(plain, evaluate_every=1)
            place = runs / f"{method}-seed{seed}"
            if (place / "config.yaml").is_file():
                result = perfed.resume(place, how=how)
            else:
                result = perfed.run(experiment, place, how=how)
            means = result.summary["models"]["personal"]
            found[f"{method}-seed{seed}"] = {
                LAST_ROUND: means["last"]["test_accuracy"],
                BEST_ROUND: means["best_test"]["test_accuracy"],
                BEST_ROUNDS: best_rounds(result),
                TRAINING_MODE: in_training_mode(result, experiment.federation()),
                "environment": result.directory.read_json("environment.json"),
            }
            write_atomically(path, (json.dumps(found, indent=1) + "\n").encode())
            shutil.rmtree(place)
            print(f"{method}, seed {seed}: {found[f'{method}-seed{seed}']}", flush=True)


def found_after() -> dict[str, list[dict[str, Any]]]:
    """By method, what there is of each seed."""
    path = FOLDER / "after.json"
    found = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    names = {method: [f"{method}-seed{seed}" for seed in SEEDS] for method in METHODS}
    return {method: [found[n] for n in of if n in found] for method, of in names.items()}


def best_rounds(result: perfed.Result) -> float:
    """The mean over clients, each in the round in which its test accuracy was highest."""
    lines = result.directory.lines("clients.jsonl")
    return float(np.max([line["personal"]["test_accuracy"] for line in lines], axis=0).mean())


def in_training_mode(result: perfed.Result, federation: Federation) -> float:
    """The mean over clients, where BatchNorm normalises a client's test samples by their own
    statistics, all of them one batch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    accuracies = []
    for client in result.model_clients():
        model = result.model(client).to(device)
        for layer in model.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train()
        test = federation.evaluated(client, "test")
        x = torch.as_tensor(federation.samples.numbers(federation.samples.x[test]), device=device)
        with torch.no_grad():
            said = model(x).argmax(1).cpu().numpy()
        accuracies.append(float((said == federation.samples.y[test]).mean()))
    return float(np.mean(accuracies))


def needs_pictures(changes: Changes) -> bool:
    """Whether it cannot be tried with digits."""
    return "data" in changes or "architectures" in changes.get("models", {})


def run_name(reading: int, method: str, seed: int) -> str:
    return f"{reading}-{method}-seed{seed}"


def found(records: Mapping[str, Record], reading: int, method: str) -> list[Record]:
    """Those of a reading and a method that there are, by seed."""
    names = [run_name(reading, method, seed) for seed in SEEDS]
    return [records[name] for name in names if name in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--after", action="store_true")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.out or (Path("runs", "readings-quick") if options.quick else FOLDER)
    planned = study(folder, options.quick)
    how = Execution(precision=options.precision)
    if options.after:
        looked_at_after(folder, options.quick, how, options.seconds)
        return
    with conducting(planned.folder) as display:
        planned.run(how, [display], seconds=options.seconds, side_by_side=True)
    print(f"{len(planned.records())} of {len(planned.experiments)} runs in {folder}")


if __name__ == "__main__":
    main()
