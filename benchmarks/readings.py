"""Is there a reading of the paper under which its numbers come out?

    python benchmarks/readings.py --precision bf16 --seconds 600      (a GPU: a minute a reading)
    python benchmarks/readings.py --quick                             (digits: a minute on a CPU)

The paper says 64.0 for local training, 70.7 for PerFed-CKT with one cluster and 74.3 with three.
Its text leaves open how clients are selected, what the mean is over, which VGG11 it is, and more.
Each reading that it allows is run with these three methods, for fewer rounds than the paper has. It
goes on where it was stopped. ``python benchmarks/render.py`` makes the table of
docs/reproduction.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from committed import RESULTS

from perfed.cli.display import conducting
from perfed.config import Experiment
from perfed.core.schema import from_mapping
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
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = options.out or (Path("runs", "readings-quick") if options.quick else FOLDER)
    planned = study(folder, options.quick)
    how = Execution(precision=options.precision)
    with conducting(planned.folder) as display:
        planned.run(how, [display], seconds=options.seconds, side_by_side=True)
    print(f"{len(planned.records())} of {len(planned.experiments)} runs in {folder}")


if __name__ == "__main__":
    main()
