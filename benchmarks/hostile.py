"""What do hostile clients do to honest ones? Methods × attacks × shares of hostile clients, with
and without robust stages, measured on the personal models of honest clients.

    python benchmarks/hostile.py tune --workers 16     which stages, by validation accuracy
    python benchmarks/hostile.py run --workers 16      the grid, on seeds that chose nothing
    python benchmarks/hostile.py run --reduced         20 minutes on two cores; a record of its own
    python benchmarks/hostile.py run --method perfed-kin   its rows; the others stay as they are

Each worker is a process of its own. Stopped, it goes on where it was. Nothing more is begun after
some time: --seconds 500. Runs and their records go to runs/, or elsewhere: --out FOLDER. The record
in benchmarks/results is written when all is there.

Local training is of the same clients at the same times as in the methods, and cannot be attacked.
The reference of a loss is the same method, seed and client, without hostile clients and without
stages; so what stages cost is in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from committed import ROOT, result

from perfed import Execution, Experiment
from perfed.config import read_mapping
from perfed.core.algorithm import algorithms
from perfed.core.hostile import Silent
from perfed.core.schema import from_mapping
from perfed.runs.result import headline_kind
from perfed.runs.study import Record, Shard, Study, folder_name, machines

RESULTS = ROOT / "benchmarks" / "results"
TUNING_SEEDS = tuple(range(1000, 1008))
SEEDS = (91, 92, 93, 94, 95)  # none of them had a say in anything
REDUCED_SEEDS = (64, 65, 66)  # nor of these
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4)
REDUCED_SHARES = (0.1, 0.3)
REDUCED_ATTACKS = ("random", "flipped", "worst", "confusing", "false count", "silent")
GOAL = 0.3  # the share at which stages are chosen and compared

BASE: dict[str, Any] = {
    "name": "hostile",
    "rounds": 30,
    "evaluate_every": 30,
    "clients": 20,
    "clients_per_round": 10,
    "selection": "uniform",
    "data": {"name": "digits", "public": 400},
    "shared_test": True,
    "fresh_mix": "held",
    "models": {"architectures": [{"name": "mlp", "hidden": [64]}]},
    "training": {"learning_rate": 0.1, "steps": 10, "batch_size": 32, "public_batch_size": 64},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "Dir(0.1)": {"partition": {"name": "dirichlet", "alpha": 0.1, "minimum": 20}},
    "IID": {"partition": {"name": "iid"}},
}
HONEST: dict[str, dict[str, Any]] = {
    "other labels": {
        "partition": {"name": "iid"},
        "shift": {"name": "labels", "groups": [4, 1]},
    },
}
"""Where nobody is hostile and a fifth means other things by its labels: what stages cost it."""
METHODS: dict[str, dict[str, Any]] = {
    "perfed-kin": {"name": "perfed-kin"},
    "perfed-ckt": {"name": "perfed-ckt", "clusters": 3, "weight": 0.5},
    "fedmd": {"name": "fedmd"},
    "fedavg": {"name": "fedavg"},
    "ditto": {"name": "ditto", "weight": 1.0},
}
LOCAL = {"name": "local", "participation": "selected"}
ATTACKS: dict[str, dict[str, Any]] = {
    "random": {"name": "random"},
    "constant": {"name": "constant"},
    "flipped": {"name": "flipped"},
    "scaled": {"name": "scaled"},
    "colluding": {"name": "colluding"},
    "worst": {"name": "worst"},
    "confusing": {"name": "confusing"},
    "false count": {"name": "worst", "samples": 100.0},
    "silent": {"name": "silent"},
}
"""By what the page calls them. Silent clients send nothing: what that costs, no stage can save."""
PRESET: list[Any] = read_mapping("robust", "presets/links")["wire"]
STAGES: dict[str, list[Any]] = {
    "none": [],
    "bounded": [{"name": "bounded"}],
    "history": [{"name": "history"}],
    "history, bounded": PRESET,
    "median": [{"name": "median"}],
    "trimmed": [{"name": "trimmed"}],
}
CANDIDATES = STAGES | {
    "history, largest only": [{"name": "history", "largest_only": True}],
    "history, bounded, all kinds": [{"name": "history"}, {"name": "bounded"}],
}
"""What is looked at to choose the preset."""
EVERY = ("none", "history, bounded")  # at every share; the others at GOAL
MEANS = ("fedmd", "fedavg", "ditto")  # methods that 'median' and 'trimmed' fit


def experiment(
    setting: str,
    algorithm: Mapping[str, Any],
    seed: int,
    attack: str = "",
    share: float = 0.0,
    stages: str = "none",
    **more: Any,
) -> Experiment:
    hostile = {**ATTACKS[attack], "share": share} if attack else None
    values = BASE | (SETTINGS | HONEST)[setting] | {"algorithm": dict(algorithm), "seed": seed}
    return from_mapping(
        Experiment, values | {"hostile": hostile, "wire": CANDIDATES[stages]} | more
    )


def seeds(reduced: bool) -> tuple[int, ...]:
    return REDUCED_SEEDS if reduced else SEEDS


def fitting(method: str, stages: str) -> bool:
    return method in MEANS or stages not in ("median", "trimmed")


def cell(setting: str, method: str, seed: int, attack: str, share: float, stages: str) -> str:
    return folder_name(f"{setting}-{method}-{stages}-{attack or 'nobody'}-{share:g}-seed{seed}")


Place = tuple[str, str, str, float, str]
"""Setting, method, attack, share, stages."""


def places(reduced: bool, methods: Collection[str] = METHODS) -> Iterator[Place]:
    every = REDUCED_SHARES if reduced else SHARES
    for setting, method, stages in itertools.product(SETTINGS, methods, STAGES):
        if not fitting(method, stages) or (reduced and stages not in EVERY):
            continue
        yield setting, method, "", 0.0, stages
        shares = every if stages in EVERY else (GOAL,)
        for attack, share in itertools.product(attacks_on(method, reduced), shares):
            yield setting, method, attack, share, stages
    for setting, method, stages in itertools.product(HONEST, methods, EVERY):
        yield setting, method, "", 0.0, stages


def attacks_on(method: str, reduced: bool = False) -> list[str]:
    """Answers that are too certain are hardly wrong: 'scaled' is for weights."""
    without = set() if algorithms[METHODS[method]["name"]].sends == "weights" else {"scaled"}
    few = set(ATTACKS) - set(REDUCED_ATTACKS) if reduced else set()
    return [attack for attack in ATTACKS if attack not in without | few]


def grid(reduced: bool, methods: Collection[str] = METHODS) -> dict[str, Experiment]:
    """With local training, where these are all methods."""
    cells = {
        cell(s, m, seed, a, share, stages): experiment(s, METHODS[m], seed, a, share, stages)
        for seed in seeds(reduced)
        for s, m, a, share, stages in places(reduced, methods)
    }
    if len(methods) < len(METHODS):
        return cells
    alone = {
        cell(s, "local", seed, "", 0.0, "none"): experiment(s, LOCAL, seed)
        for seed in seeds(reduced)
        for s in SETTINGS | HONEST
    }
    return alone | cells


def trials() -> dict[str, Experiment]:
    """At GOAL, every method with every stage that fits it; half of the validation samples are kept
    from methods that use them."""
    held_out = {"split": {"second_validation": True}}
    return {
        cell(s, m, seed, a, GOAL, stages): experiment(
            s, METHODS[m], seed, a, GOAL, stages, **held_out
        )
        for seed in TUNING_SEEDS
        for s, m, stages in itertools.product(SETTINGS, METHODS, CANDIDATES)
        if fitting(m, stages)
        for a in attacks_on(m)
        if a != "silent"
    }


def tuned(records: Mapping[str, Record]) -> dict[str, Any]:
    """Mean validation accuracy of honest clients, by method and stages, over all else."""
    scores: dict[str, dict[str, float]] = {}
    for method, stages in itertools.product(METHODS, CANDIDATES):
        if fitting(method, stages):
            names = [
                cell(s, method, seed, a, GOAL, stages)
                for seed in TUNING_SEEDS
                for s in SETTINGS
                for a in attacks_on(method)
                if a != "silent"
            ]
            found = [validation_accuracy(records[name]) for name in names]
            scores.setdefault(method, {})[stages] = round(100 * statistics.mean(found), 2)
    best = {method: max(by, key=lambda s: by[s]) for method, by in scores.items()}
    return {
        "validation_accuracy": scores,
        "best": best,
        "seeds": TUNING_SEEDS,
        "share": GOAL,
        "environments": machines(records),
    }


def validation_accuracy(record: Record) -> float:
    """Of the last round; of a run that diverged, nothing."""
    if "summary" not in record:
        return 0.0
    models = record["summary"]["models"]
    accuracy: float = models[headline_kind(models)]["last"]["validation_accuracy"]
    return accuracy


def accuracies(record: Record | None) -> list[int] | None:
    """Of every client, in hundredths of a point; nothing of a run that diverged."""
    if record is None or "summary" not in record:
        return None
    kind = headline_kind(record["summary"]["models"])
    return [round(1e4 * value) for value in record["clients"]["test_accuracy"][kind]]


def gathered_rows(
    records: Mapping[str, Record], reduced: bool, methods: Collection[str] = METHODS
) -> list[dict[str, Any]]:
    """Accuracies of all clients, by seed."""
    return [
        {
            "setting": s,
            "method": m,
            "attack": a,
            "share": share,
            "stages": stages,
            "clients": [
                accuracies(records[cell(s, m, seed, a, share, stages)]) for seed in seeds(reduced)
            ],
        }
        for s, m, a, share, stages in places(reduced, methods)
    ]


def anew(
    name: str, records: Mapping[str, Record], reduced: bool, methods: Collection[str]
) -> dict[str, Any]:
    """What is on record, with new rows of some methods in the place of theirs."""
    there = result(name)
    rows = [row for row in there["rows"] if row["method"] not in methods]
    environments = there["environments"] + machines(records)
    content = {key: there[key] for key in ("seeds", "local", "hostile")}
    new = gathered_rows(records, reduced, methods)
    return content | {"rows": [*new, *rows], "environments": environments}


def gathered(records: Mapping[str, Record], reduced: bool) -> dict[str, Any]:
    """Accuracies of all clients, and who of them is hostile, by seed."""
    local = {
        s: [accuracies(records[cell(s, "local", seed, "", 0.0, "none")]) for seed in seeds(reduced)]
        for s in SETTINGS | HONEST
    }
    hostile = {
        f"{share:g}": [
            Silent(share=share).clients(BASE["clients"], seed).nonzero()[0].tolist()
            for seed in seeds(reduced)
        ]
        for share in SHARES
    }
    rows = gathered_rows(records, reduced)
    return {
        "seeds": seeds(reduced),
        "rows": rows,
        "local": local,
        "hostile": hostile,
        "environments": machines(records),
    }


def write(name: str, content: Mapping[str, Any]) -> None:
    origin = {
        "config": BASE,
        "settings": SETTINGS | HONEST,
        "methods": METHODS,
        "attacks": ATTACKS,
        "stages": CANDIDATES,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({**content, **origin}, separators=(",", ":")) + "\n", "utf-8")


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("action", choices=("tune", "run"))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--reduced", action="store_true", help="two shares, fewer attacks, other seeds"
    )
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--out", type=Path, default=ROOT / "runs")
    parser.add_argument("--shard", type=Shard.parse, help="1/4, say: what a worker is given")
    return parser.parse_args(arguments)


def main(*arguments: str) -> None:
    given = parsed(arguments)
    tuning = given.action == "tune"
    name = "hostile_tune" if tuning else "hostile_reduced" if given.reduced else "hostile"
    methods = given.method or [*METHODS]
    study = Study(given.out / name, trials() if tuning else grid(given.reduced, methods))
    if given.shard is None and given.workers > 1:
        shards = [f"{number}/{given.workers}" for number in range(1, given.workers + 1)]
        one = [sys.executable, __file__, *arguments, "--shard"]
        for process in [subprocess.Popen([*one, shard]) for shard in shards]:
            process.wait()
    else:
        torch.set_num_threads(1)
        study.run(Execution(device="cpu"), shard=given.shard, seconds=given.seconds)
    if given.shard is None and not study.missing():
        records = study.records()
        if tuning:
            write(name, tuned(records))
        elif given.method:
            write(name, anew(name, records, given.reduced, methods))
        else:
            write(name, gathered(records, given.reduced))


if __name__ == "__main__":
    main(*sys.argv[1:])
