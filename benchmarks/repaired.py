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
from perfed.data import Federation, partitions
from perfed.paper.tables import table_run
from perfed.runs.study import read_record


def check_records(experiment: Experiment, federation: Federation) -> int:
    """How many committed records of this seed's partition there are, and have its sizes."""
    sizes, checked = federation.train_sizes.tolist(), 0
    for path in RESULTS.glob(f"paper-T*/table1/records/*-seed{experiment.seed}.json"):
        record = read_record(path)
        alike = partitions.build(record["config"]["partition"]) == experiment.partition
        if alike and "clients" in record:
            if record["clients"]["train_size"] != sizes:
                raise SystemExit(f"{path} has another partition")
            checked += 1
    return checked


def main() -> None:
    chosen = table_run(1, quick=False)
    found: dict[str, list[int]] = {}
    for seed in chosen.seeds:
        experiment = chosen.experiment({"name": "local"}, chosen.fractions[0], seed)
        federation = experiment.federation()
        records = check_records(experiment, federation)
        found[str(seed)] = np.flatnonzero(federation.partition_facts["repaired"]).tolist()
        print(f"seed {seed}: {len(found[str(seed)])} repaired; as in {records} records")
    result = {"partition": experiment.to_mapping()["partition"], "clients": found}
    (RESULTS / "repaired.json").write_text(json.dumps(result) + "\n", "utf-8")


if __name__ == "__main__":
    main()
