"""Does knowledge transfer keep its promise? PerFed-Evidence and PerFed-CKT against local training.

    python benchmarks/successor.py tune digits      settings, by validation accuracy of other seeds
    python benchmarks/successor.py steps cifar      would another step size have chosen otherwise?
    python benchmarks/successor.py run digits       results, with those settings, seeds 5-9
    python benchmarks/successor.py run cifar        after perfed data get cifar10, and cifar100
    python benchmarks/successor.py own cifar        some of it, judged by clients' own test samples
    python benchmarks/successor.py alike cifar      or by fresh ones with the mix of labels of those

A family is a preset, ``successor-digits`` say, with every partition it is run with: ``digits`` (an
MLP; half an hour on one core), ``cifar`` (4,000 images, a small CNN; three hours on one core),
``vgg`` (12,000 images, VGG11) and ``mixed`` (the same with VGG13, VGG11 and CNN by data size). The
last two are for a GPU. PerFed-Evidence has the same settings everywhere: its defaults, and once
more with more caution. Local training here is of the same clients at the same times, so that only
the transfer differs. Stopped, it goes on where it was.

Where there are pictures to spare, a client is judged by 2,000 of them with the mix of labels that
the partition gave it, not by its own test samples, of which it may have ten.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from committed import ROOT, result

from perfed import Execution, Experiment
from perfed.algorithms.local import Local
from perfed.algorithms.perfed_evidence import PerFedEvidence
from perfed.config import read_mapping
from perfed.core.algorithm import Client, Predictor, algorithms, supervised
from perfed.core.message import Message
from perfed.core.schema import from_mapping
from perfed.runs.result import headline_kind
from perfed.runs.study import Record, Study, client_gains, folder_name, machines

RESULTS = ROOT / "benchmarks" / "results"
TUNING_SEEDS = (1000, 1001)
SEEDS = (5, 6, 7, 8, 9)  # 0-4 have had a say in an earlier form of the algorithm


@algorithms.register("local-again")
@dataclass(frozen=True)
class LocalAgain(Local):
    """Local training with other mini-batches: what chance alone makes of a client's accuracy."""

    def client_round(self, client: Client, message: Message) -> Message:
        client.weights = client.sgd(client.weights, supervised, stream=1)
        return Message()


@algorithms.register("evidence-beside-local")
@dataclass(frozen=True)
class EvidenceBesideLocal(PerFedEvidence):
    """PerFed-Evidence with its witness, which is the client's local model, judged beside it, and
    what it would be with more caution: one run instead of three, and on a GPU, where no two runs
    are equal to the last bit, the very same local model."""

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        cautious = self.personal(client, CAUTION)
        return super().models(client, message) | {"local": client.weights, "cautious": cautious}


def _family(name: str) -> dict[str, Any]:
    """A preset as an experiment that is judged at its end only."""
    preset = read_mapping(f"successor-{name}")
    for of_comparison in ("about", "partition", "algorithms", "seeds"):
        del preset[of_comparison]
    return preset | {"name": "successor", "evaluate_every": preset["rounds"]}


FAMILIES = {name: _family(name) for name in ("digits", "cifar", "vgg", "mixed")}
SKEWED = {"name": "dirichlet", "minimum": 20}
PARTITIONS: dict[str, dict[str, dict[str, Any]]] = {
    "digits": {
        "3 groups": {"name": "groups", "groups": 3},
        "Dir(0.01)": SKEWED | {"alpha": 0.01},
        "Dir(0.1)": SKEWED | {"alpha": 0.1},
        "Dir(1)": SKEWED | {"alpha": 1.0},
        "IID": {"name": "iid"},
    },
    "cifar": {
        "5 groups": {"name": "groups", "groups": 5},
        "Dir(0.01)": SKEWED | {"alpha": 0.01},
        "Dir(0.1)": SKEWED | {"alpha": 0.1},
        "Dir(0.5)": SKEWED | {"alpha": 0.5},
    },
}
PARTITIONS["vgg"] = PARTITIONS["mixed"] = PARTITIONS["cifar"]
# What is looked for on the tuning seeds: λ of the methods that have one, down to 0.1, and further
# up until it gets worse (with VGG11 as far as time allowed). Mixed networks have that of VGG11.
GRID: dict[str, dict[str, tuple[float, ...]]] = {
    "digits": {"perfed-ckt": (0.1, 0.5, 2.0, 8.0, 32.0, 128.0), "ditto": (0.1, 1.0, 10.0)},
    "cifar": {"perfed-ckt": (0.1, 0.5, 2.0, 8.0), "ditto": (0.1, 1.0, 10.0)},
    "vgg": {"perfed-ckt": (0.1, 0.5, 2.0, 8.0), "ditto": (0.1, 1.0)},
}
TUNED_AS = {"mixed": "vgg"}
MIDDLE = 0.5  # of what was tried with VGG11; mixed networks have PerFed-CKT with this λ too
CLUSTERS = {"perfed-ckt": {"clusters": 3}}
# All methods have the preset's step size. Whether that is fair is looked at with fewer trials.
STEP_SIZES = (0.01, 0.05, 0.2)
STEP_WEIGHTS: dict[str, tuple[float | None, ...]] = {
    "local": (None,),
    "perfed-ckt": (0.1, 0.5, 2.0),
    "ditto": (0.1, 1.0),
}
CAUTION = 8.0
BESIDE_LOCAL = ("evidence", "local", "cautious")  # judged in one run, where samples are fresh
# Who judges, by what is changed in the preset.
JUDGES: dict[str, dict[str, Any]] = {
    "": {},
    "own": {"fresh_test": 0, "fresh_mix": "test"},
    "alike": {"fresh_mix": "test"},
}
SMALL_CLIENTS = ("Dir(0.01)", "Dir(0.1)")


def is_asked(judge: str, partition: str, method: str) -> bool:
    """Other judges are asked where they may judge otherwise."""
    if judge == "own":
        return method in ("local", "local again", "evidence")
    return judge != "alike" or method in BESIDE_LOCAL or partition in SMALL_CLIENTS


def methods(family: str, partition: str) -> dict[str, dict[str, Any]]:
    """Those of the preset by name, with the λ found for the partition; local training once more,
    and more caution."""
    chosen = result(f"successor_tune_{TUNED_AS.get(family, family)}")["chosen"][partition]
    found: dict[str, dict[str, Any]] = {}
    for listed in read_mapping(f"successor-{family}")["algorithms"]:
        algorithm = dict(listed) if isinstance(listed, dict) else {"name": listed}
        name = algorithm["name"]
        if name in chosen:
            algorithm["weight"] = chosen[name]
        short = {"perfed-evidence": "evidence", "perfed-ckt": f"c={algorithm.get('clusters')}"}
        found[short.get(name, name)] = algorithm
        if name == "perfed-ckt" and family in TUNED_AS:
            found[f"{short[name]} at {MIDDLE}"] = algorithm | {"weight": MIDDLE}
    again = {"name": "local-again", "participation": "selected"}
    return found | {"local again": again, "cautious": found["evidence"] | {"caution": CAUTION}}


def experiment(family: str, partition: str, algorithm: Mapping[str, Any], seed: int) -> Experiment:
    values = FAMILIES[family] | {"partition": PARTITIONS[family][partition]}
    return from_mapping(Experiment, values | {"algorithm": dict(algorithm), "seed": seed})


class Cell(NamedTuple):
    """A run, and which of the models judged in it is the method's."""

    partition: str
    method: str
    seed: int
    run: str
    experiment: Experiment
    kind: str = ""  # the personal one, or if there is none the global one


def cells(family: str, judge: str = "") -> Iterator[Cell]:
    for partition in PARTITIONS[family]:
        for method, algorithm in methods(family, partition).items():
            if not is_asked(judge, partition, method):
                continue
            kind, run = "", method
            if method in BESIDE_LOCAL and family != "digits" and judge != "own":
                kind, run = method if method != "evidence" else "personal", "evidence"
                algorithm = {"name": "evidence-beside-local"}
            for seed in SEEDS:
                what = experiment(family, partition, algorithm, seed)
                what = replace(what, **JUDGES[judge])
                name = folder_name(f"{partition}-{run}-seed{seed}")
                yield Cell(partition, method, seed, name, what, kind)


# Runs by name, of each value tried for λ, of each thing that it is looked for.
Trials = dict[tuple[Any, ...], dict[float | None, dict[str, Experiment]]]


def tune(family: str, how: Execution, folder: Path) -> None:
    """λ of each method, for each partition."""
    trials: Trials = {
        (partition, method): {w: trial(family, partition, method, w) for w in weights}
        for method, weights in GRID[family].items()
        for partition in PARTITIONS[family]
    }
    found, records = searched(trials, how, folder / f"successor-tune-{family}")
    scores: dict[str, dict[str, dict[str, float]]] = {}
    chosen: dict[str, dict[str, float | None]] = {}
    for (partition, method), mean in found.items():
        scores.setdefault(partition, {})[method] = {f"{w:g}": mean[w] for w in mean}
        chosen.setdefault(partition, {})[method] = max(mean, key=lambda weight: mean[weight])
    content = {"validation_accuracy": scores, "chosen": chosen, "seeds": TUNING_SEEDS}
    _write(f"successor_tune_{family}.json", content | _origin(family, records, JUDGES["own"]))


def steps(family: str, how: Execution, folder: Path) -> None:
    """Methods at several step sizes, each with the best of a few λ there."""
    trials: Trials = {
        (partition, method, step): {w: trial(family, partition, method, w, step) for w in weights}
        for partition in ("5 groups", "Dir(0.1)")
        for method, weights in STEP_WEIGHTS.items()
        for step in STEP_SIZES
    }
    found, records = searched(trials, how, folder / f"successor-steps-{family}")
    rows = []
    for (partition, method, step), mean in found.items():
        best = max(mean, key=lambda weight: mean[weight])
        row = {"partition": partition, "method": method, "step_size": step, "weight": best}
        rows.append(row | {"validation_accuracy": mean[best]})
    content = {"rows": rows, "weights": STEP_WEIGHTS, "seeds": TUNING_SEEDS}
    _write(f"successor_steps_{family}.json", content | _origin(family, records, JUDGES["own"]))


def trial(
    family: str, partition: str, method: str, weight: float | None, step: float | None = None
) -> dict[str, Experiment]:
    """A run for each tuning seed. Only its validation data are looked at."""
    tried = {"name": method, **CLUSTERS.get(method, {})}
    tried |= {"participation": "selected"} if weight is None else {"weight": weight}
    runs = {}
    for seed in TUNING_SEEDS:
        what = replace(experiment(family, partition, tried, seed), **JUDGES["own"])
        if step is not None:
            what = replace(what, training=replace(what.training, learning_rate=step))
        name = "-".join(f"{part:g}" for part in (weight, step) if part is not None)
        runs[folder_name(f"{partition}-{method}-{name}-seed{seed}")] = what
    return runs


def searched(
    trials: Trials, how: Execution, folder: Path
) -> tuple[dict[tuple[Any, ...], dict[float | None, float]], Mapping[str, Record]]:
    """Of every trial the validation accuracy, mean over clients and tuning seeds."""
    everything = [runs for by_weight in trials.values() for runs in by_weight.values()]
    study = Study(folder, {name: what for runs in everything for name, what in runs.items()})
    study.run(how, side_by_side=how.device == "cuda")
    records = study.records()
    found = {
        key: {weight: _validation_accuracy(records, list(runs)) for weight, runs in values.items()}
        for key, values in trials.items()
    }
    return found, records


def _validation_accuracy(records: Mapping[str, Record], names: Sequence[str]) -> float:
    """The mean over seeds; of a run that diverged, nothing."""
    return round(
        statistics.mean(
            records[name]["summary"]["models"]["personal"]["last"]["validation_accuracy"]
            if "summary" in records[name]
            else 0.0
            for name in names
        ),
        5,
    )


def run(family: str, how: Execution, folder: Path, judge: str = "") -> None:
    everything = {cell.run: cell.experiment for cell in cells(family, judge)}
    study = Study(folder / _named(family, judge).replace("_", "-"), everything)
    study.run(how, side_by_side=how.device == "cuda")
    write_results(family, study.records(), judge)


def _named(family: str, judge: str) -> str:
    return "_".join(filter(None, ["successor", family, judge]))


def write_results(family: str, records: Mapping[str, Record], judge: str = "") -> None:
    found: dict[tuple[str, str], dict[int, Judgement]] = {}
    for cell in cells(family, judge):
        record = records.get(cell.run)
        if record and "failed" not in record:
            judged = found.setdefault((cell.partition, cell.method), {})
            judged[cell.seed] = (record, cell.kind)
    rows = [
        {"partition": partition, "method": method, **row(judged, found[partition, "local"])}
        for (partition, method), judged in found.items()
    ]
    settings: dict[str, Any] = {partition: {} for partition in PARTITIONS[family]}
    for partition, method in found:
        settings[partition][method] = methods(family, partition)[method]
    content = {"rows": rows, "methods": settings, "seeds": SEEDS}
    _write(f"{_named(family, judge)}.json", content | _origin(family, records, JUDGES[judge]))


Judgement = tuple[Record, str]  # and the kind of model


def row(found: Mapping[int, Judgement], local: Mapping[int, Judgement]) -> dict[str, Any]:
    """Of every seed the accuracy, of every client the gain over its own local model."""
    both = {seed: (*judged, *local[seed]) for seed, judged in found.items() if seed in local}
    gains = [
        client_gains(
            record,
            alone,
            kind or headline_kind(record["summary"]["models"]),
            local_kind or "personal",
        )
        for record, kind, alone, local_kind in both.values()
    ]
    accuracies = [
        statistics.mean(
            record["clients"]["test_accuracy"][kind or headline_kind(record["summary"]["models"])]
        )
        for record, kind, *_ in both.values()
    ]
    records = [record for record, *_ in both.values()]
    is_local = found == local  # maybe judged in the run of a method that sends something
    return {
        "seeds": list(both),
        "accuracy": [round(accuracy, 5) for accuracy in accuracies],
        # Of every client of every seed: points above local training, training samples, labels.
        "clients": [[[round(gain, 2), *rest] for gain, *rest in of_seed] for of_seed in gains],
        "parameters_per_round": 0 if is_local else _per_round(records, "parameters"),
        "bytes_per_round": 0 if is_local else _per_round(records, "bytes"),
    }


def _per_round(records: list[Record], unit: str) -> int:
    traffic = [r["summary"]["traffic"] for r in records]
    total = statistics.mean(t[f"up_{unit}"] + t[f"down_{unit}"] for t in traffic)
    return round(total / records[0]["config"]["rounds"])


def _origin(
    family: str, records: Mapping[str, Record], changes: Mapping[str, Any]
) -> dict[str, Any]:
    newest = machines(records)
    return {
        "config": FAMILIES[family] | changes,
        "partitions": PARTITIONS[family],
        "environment": newest[0],
        "other_environments": newest[1:],
    }


def _write(name: str, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, separators=(",", ":"))
    (RESULTS / name).write_text(text + "\n")


if __name__ == "__main__":
    action, family, *rest = sys.argv[1:]
    how = Execution(**dict(part.split("=", 1) for part in rest))  # device=cuda precision=bf16
    if action in ("tune", "steps"):
        {"tune": tune, "steps": steps}[action](family, how, ROOT / "runs")
    else:
        run(family, how, ROOT / "runs", {"run": "", "own": "own", "alike": "alike"}[action])
