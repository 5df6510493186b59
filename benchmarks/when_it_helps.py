"""When does PerFed-CKT beat local training, and c>1 beat c=1, for which clients?

    python benchmarks/when_it_helps.py digits   half an hour on one core
    python benchmarks/when_it_helps.py cifar    an hour on two; after perfed data get cifar10, and
                                                cifar100

One factor at a time is changed from a base: handwritten digits with an MLP, or 12,000 CIFAR-10
images with the paper's CNN and CIFAR-100 as the public set. Every setting is run with local
training (of the same clients at the same times, so that only the transfer differs) and PerFed-CKT
with c=1 and c=3, three seeds. Nothing is chosen: all of it is reported. Stopped, it goes on where
it was.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfed import Experiment
from perfed.config import apply_override
from perfed.core.schema import from_mapping
from perfed.runs.study import Record, Study, client_gains, folder_name

ROOT = Path(__file__).parents[1]
SEEDS = (0, 1, 2)

DIGITS: dict[str, Any] = {
    "name": "digits",
    "rounds": 60,
    "evaluate_every": 10,
    "clients": 30,
    "clients_per_round": 10,
    "selection": "uniform",
    "data": {"name": "digits", "public": 400},
    "models": {"architectures": [{"name": "mlp", "hidden": [64]}]},
    "training": {
        "learning_rate": 0.1,
        "steps": 10,
        "batch_size": 32,
        "public_batch_size": 64,
    },
}
CIFAR: dict[str, Any] = DIGITS | {
    "name": "cifar",
    "rounds": 40,
    "evaluate_every": 10,
    "clients": 50,
    "data": {"name": "cifar10", "public": 1000, "samples": 12_000},
    "models": {"architectures": [{"name": "cnn", "batchnorm": True}]},
    "training": {
        "learning_rate": 0.05,
        "steps": 10,
        "batch_size": 16,
        "public_batch_size": 32,
    },
}

PARTITIONS = {
    "Dir(0.01)": {"name": "dirichlet", "alpha": 0.01, "minimum": 20},
    "Dir(0.1)": {"name": "dirichlet", "alpha": 0.1, "minimum": 20},
    "Dir(0.5)": {"name": "dirichlet", "alpha": 0.5, "minimum": 20},
    "own mixes, equal sizes": {"name": "client-dirichlet", "alpha": 0.1},
    "2 shards": {"name": "shards", "per_client": 2},
    "3 groups": {"name": "groups", "groups": 3},
    "3 groups, 20 % mixed": {"name": "groups", "groups": 3, "mixed": 0.2},
    "IID": {"name": "iid"},
}
WEIGHTS = (0.05, 0.5, 2.0, 8.0)
# Where the paper is, and where the method is at home.
HOMES = ("Dir(0.01)", "3 groups")
CHANGES: dict[str, list[str]] = {
    "η = 0.01": ["training.learning_rate=0.01"],
    "τ = 50": ["training.steps=50"],
    "5 times the rounds": ["rounds=300", "evaluate_every=50"],
    "drawn by size": ["selection=by-size"],
    "everybody takes part": ["clients_per_round=30"],
    "own initial weights": ["models.initial=own"],
    "CNN": ["models.architectures=[cnn]"],
    "CNN with BatchNorm": ["models.architectures=[{name: cnn, batchnorm: true}]"],
    "BatchNorm, private batches only": [
        "models.architectures=[{name: cnn, batchnorm: true}]",
        "training.public_batchnorm=private",
    ],
    "BatchNorm, all batches": [
        "models.architectures=[{name: cnn, batchnorm: true}]",
        "training.public_batchnorm=shared",
    ],
    "public set of 100": ["data.public=100"],
    "three networks": [
        "models.architectures=[{name: mlp, hidden: [32]}, {name: mlp, hidden: [128]}, "
        "{name: cnn, batchnorm: true}]"
    ],
}


@dataclass(frozen=True)
class Setting:
    """One cell: a partition, λ, and what else is changed."""

    partition: str
    weight: float = 1.0
    change: str = ""

    def experiments(self, base: Mapping[str, Any]) -> Iterator[tuple[str, str, Experiment]]:
        """A name, the method, the experiment."""
        methods = {
            "local": {"name": "local", "participation": "selected"},
            "c=1": {"name": "perfed-ckt", "clusters": 1, "weight": self.weight},
            "c=3": {"name": "perfed-ckt", "clusters": 3, "weight": self.weight},
        }
        for method, algorithm in methods.items():
            for seed in SEEDS:
                values = json.loads(json.dumps(dict(base)))
                values["partition"] = dict(PARTITIONS[self.partition])
                for text in CHANGES.get(self.change, []):
                    apply_override(values, text)
                values |= {"algorithm": algorithm, "seed": seed}
                experiment = from_mapping(Experiment, values)
                # Local training has no λ: settings that differ in it only share the run.
                weight = "" if method == "local" else f"-{self.weight:g}"
                name = f"{self.partition}-{self.change}-{method}{weight}-seed{seed}"
                yield folder_name(name), method, experiment


def settings(which: str) -> list[Setting]:
    if which == "cifar":
        rows = [Setting(p) for p in ("Dir(0.01)", "3 groups", "IID", "Dir(0.5)")]
        return rows + [Setting(home, change="τ = 50") for home in HOMES]
    rows = [Setting(partition) for partition in PARTITIONS]
    rows += [Setting(home, weight) for home in HOMES for weight in WEIGHTS]
    rows += [Setting(home, change=change) for home in HOMES for change in CHANGES]
    return rows


def cell(name: str, by_method: Mapping[str, list[Record]], setting: Setting) -> dict[str, Any]:
    """One setting's numbers: accuracy by seed, and the gains of groups of clients."""
    row: dict[str, Any] = {"data": name, **vars(setting), "methods": {}}
    for method, records in by_method.items():
        last = [r["summary"]["models"]["personal"]["last"] for r in records]
        entry: dict[str, Any] = {"accuracy": [round(x["test_accuracy"], 5) for x in last]}
        if method != "local":
            pairs = zip(records, by_method["local"], strict=True)
            all_gains = [g for one, other in pairs for g in client_gains(one, other, "personal")]
            entry["gain"] = {
                group: round(statistics.mean(g for g, _, _ in members), 2)
                for group, members in {
                    "all": all_gains,
                    "fewer than 10 samples": [g for g in all_gains if g[1] < 10],
                    "10 or more": [g for g in all_gains if g[1] >= 10],
                    "1 label": [g for g in all_gains if g[2] == 1],
                    "2 or more labels": [g for g in all_gains if g[2] > 1],
                }.items()
                if members
            }
            entry["harmed"] = round(statistics.mean(g < -2 for g, _, _ in all_gains), 4)
        row["methods"][method] = entry
    return row


def main(which: str) -> None:
    base = {"digits": DIGITS, "cifar": CIFAR}[which]
    cells = [(setting, list(setting.experiments(base))) for setting in settings(which)]
    everything = {name: e for _, experiments in cells for name, _, e in experiments}
    study = Study(ROOT / "runs" / f"when_it_helps-{which}", everything)
    study.run()
    records = study.records()
    rows = []
    for setting, experiments in cells:
        by_method: dict[str, list[Record]] = {}
        for name, method, _ in experiments:
            by_method.setdefault(method, []).append(records[name])
        rows.append(cell(which, by_method, setting))
    first = next(iter(records.values()))
    result = {
        "rows": rows,
        "seeds": SEEDS,
        "config": base,
        "partitions": PARTITIONS,
        "changes": CHANGES,
        "environment": first["environment"],
    }
    path = ROOT / "benchmarks" / "results" / f"when_it_helps_{which}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
