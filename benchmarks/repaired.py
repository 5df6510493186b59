"""Which clients of the paper's partition were made by its repair, for records that do not say so.

python benchmarks/repaired.py   writes benchmarks/results/repaired.json, in seconds, with CIFAR-10

Dir(0.01) leaves many clients with fewer samples than the minimum; these get some of the largest
clients'. Who they are follows from the labels and the seed, without training. Committed records
have each client's number of samples: the script stops if the partition made again has others.
"""

from __future__ import annotations

import json

import numpy as np
from committed import RESULTS

from perfed.config import Experiment
from perfed.core.streams import numpy_stream
from perfed.data import build_federation
from perfed.paper.tables import table_run
from perfed.runs.study import read_record


def repaired_clients(experiment: Experiment) -> list[int]:
    """Those that the draw alone gives fewer samples than the minimum."""
    samples = experiment.data.load(experiment.seed)
    random = numpy_stream(experiment.seed, "partition")
    owner = experiment.partition.assign(samples.y, samples.classes, experiment.clients, random)
    drawn = np.bincount(owner, minlength=experiment.clients)
    return [int(client) for client in np.flatnonzero(drawn < experiment.partition.minimum_size())]


def train_sizes(experiment: Experiment) -> list[int]:
    federation = build_federation(
        experiment.data, experiment.partition, experiment.split, experiment.clients, experiment.seed
    )
    sizes: list[int] = federation.train_sizes.tolist()
    return sizes


def check_records(experiment: Experiment) -> int:
    """How many committed records of this seed's partition there are, and have its sizes."""
    sizes, config = train_sizes(experiment), experiment.to_mapping()
    checked = 0
    for path in RESULTS.glob(f"paper-T*/table1/records/*-seed{experiment.seed}.json"):
        record = read_record(path)
        if record["config"]["partition"] == config["partition"] and "clients" in record:
            if record["clients"]["train_size"] != sizes:
                raise SystemExit(f"{path} has another partition")
            checked += 1
    return checked


def main() -> None:
    chosen = table_run(1, quick=False)
    found: dict[str, list[int]] = {}
    for seed in chosen.seeds:
        experiment = chosen.experiment({"name": "local"}, chosen.fractions[0], seed)
        records = check_records(experiment)
        found[str(seed)] = repaired_clients(experiment)
        print(f"seed {seed}: {len(found[str(seed)])} repaired; as in {records} records")
    result = {"partition": experiment.to_mapping()["partition"], "clients": found}
    (RESULTS / "repaired.json").write_text(json.dumps(result) + "\n", "utf-8")


if __name__ == "__main__":
    main()
