"""Accuracy against bytes, codec by codec; and how the link 'tiny' was chosen.

    python benchmarks/bytes.py tune       candidates for 'tiny'; quarter of an hour on a core
    python benchmarks/bytes.py digits     codecs on fresh seeds; quarter of an hour on a core
    python benchmarks/bytes.py cifar --device cuda --precision bf16 --seconds 1500
                                          the same with VGG11 and mixed networks, for a GPU
    python benchmarks/bytes.py paper      one round of the paper's setting, real encodings; a minute

Stopped, each goes on where it was; --seconds says when no new run is begun; --workers 14 shares the
runs among processes. 'tune' looks at
validation samples that no method uses (``split.second_validation``), of seeds that are used for
nothing else. What is found is in benchmarks/results/bytes_*.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from committed import RESULTS, ROOT

from perfed import Execution, Experiment
from perfed.config import parse
from perfed.core.algorithm import algorithms
from perfed.core.declaration import Known
from perfed.core.message import Message
from perfed.core.tensorfile import encoded_size
from perfed.core.tree import Weights
from perfed.core.wire import Link, Stage, stages
from perfed.models import build_module
from perfed.runs.study import Record, Shard, Study, folder_name, machines

TUNING_SEEDS = (1000, 1001, 1002, 1003)
SEEDS = (30, 31, 32)
LAST = 5  # evaluations whose mean counts: one alone is chance

DIGITS: dict[str, Any] = {
    "name": "digits",
    "rounds": 40,
    "evaluate_every": 2,
    "clients": 30,
    "clients_per_round": 10,
    "selection": "uniform",
    "data": {"name": "digits", "public": 400},
    "partition": {"name": "groups", "groups": 3},
    # More validation samples than the paper has: a choice by them is less a matter of chance.
    "split": {"train": [0.3], "validation": 0.35, "test": 0.35, "second_validation": True},
    "models": {
        "architectures": [{"name": "mlp", "hidden": [32]}, {"name": "mlp", "hidden": [128]}]
    },
    "training": {
        "learning_rate": 0.1,
        "steps": 10,
        "batch_size": 32,
        "public_batch_size": 64,
    },
}
CIFAR: dict[str, Any] = DIGITS | {
    "name": "cifar",
    "rounds": 60,
    "evaluate_every": 5,
    "clients": 50,
    "data": {"name": "cifar10", "public": 1000, "samples": 12_000},
    "partition": {"name": "dirichlet", "alpha": 0.1, "minimum": 20},
    "models": {"architectures": ["vgg11-bn"]},
    "training": {
        "learning_rate": 0.05,
        "steps": 20,
        "batch_size": 32,
        "public_batch_size": 64,
    },
}
MIXED = {"architectures": [{"name": "cnn", "batchnorm": True}, "vgg11-bn", "vgg13-bn"]}
CKT = {"name": "perfed-ckt", "clusters": 3, "weight": 1.0}
KIN = {"name": "perfed-kin"}
FEDAVG = {"name": "fedavg"}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "digits": {"digits": DIGITS},
    "cifar": {"CIFAR-10, VGG11": CIFAR, "CIFAR-10, mixed": CIFAR | {"models": MIXED}},
}


def probability(bits: int, log_bits: int | None = None) -> dict[str, Any]:
    return {"name": "probability-bits", "bits": bits, "log_bits": log_bits}


def number(bits: int) -> dict[str, Any]:
    return {"name": "number-bits", "bits": bits}


def some(share: float) -> dict[str, Any]:
    return {"name": "cached", "share": share, "down_share": share}


TOP = {"name": "top-probabilities", "number": 2}
OUTPUT_CODECS: dict[str, list[Any]] = {
    "float32": [],
    "8 bits": [probability(8), number(8)],
    "4 bits": [probability(4), number(4)],
    "2 bits": [probability(2), number(2)],
    "hard labels": [probability(1), number(8)],
    "the two most probable": [TOP, number(8)],
    "what changed by 0.1": [{"name": "cached", "threshold": 0.1}],
    "a quarter of the samples": [some(0.25)],
    "deflate": ["deflate"],
    "4 bits, deflate": [probability(4), number(4), "deflate"],
    "4 bits, a quarter, deflate": [probability(4), some(0.25), number(4), "deflate"],
}
WEIGHT_CODECS: dict[str, list[Any]] = {
    "float32": [],
    "8 bits": [number(8)],
    "the largest 5 % of changes": [{"name": "top-changes", "share": 0.05}],
    "the largest 5 %, 8 bits, deflate": [
        {"name": "top-changes", "share": 0.05},
        number(8),
        "deflate",
    ],
}
CANDIDATES: dict[str, list[Any]] = {
    "float32": [],
    **{
        f"{bits} and {log_bits} bits, {share:g}": [
            probability(bits, log_bits),
            some(share),
            number(2),
            "deflate",
        ]
        for bits, log_bits, share in (
            (2, 2, 1.0),
            (2, 2, 0.5),
            (2, 3, 1.0),
            (2, 3, 0.5),
            (3, 3, 1.0),
            (3, 3, 0.5),
            (4, 4, 0.5),
            (4, 4, 0.25),
        )
    },
}
"""Bits of a probability and of one whose logarithm is sent, the share of public samples a round."""
TINY = "tiny"


def experiments(
    settings: Mapping[str, Mapping[str, Any]],
    codecs: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
) -> dict[tuple[str, str, str, int], Experiment]:
    """By setting, method, codec and seed."""
    found: dict[tuple[str, str, str, int], Experiment] = {}
    for setting, base in settings.items():
        for method, wires in codecs.items():
            algorithm = next(a for a in (CKT, KIN, FEDAVG) if a["name"] == method)
            if method == "fedavg" and len(base["models"]["architectures"]) > 1:
                base = dict(base) | {
                    "models": {"architectures": base["models"]["architectures"][-1:]}
                }
            for codec, wire in wires.items():
                for seed in seeds:
                    values = dict(base) | {"algorithm": algorithm, "wire": wire, "seed": seed}
                    experiment = parse(values | ({"link": TINY} if codec == TINY else {}))
                    assert isinstance(experiment, Experiment)
                    found[setting, method, codec, seed] = experiment
    return found


def wanted(what: str) -> dict[tuple[str, str, str, int], Experiment]:
    if what == "tune":
        tried = dict.fromkeys(("perfed-ckt", "perfed-kin"), CANDIDATES)
        return experiments(SETTINGS["digits"], tried, TUNING_SEEDS)
    outputs = {"float32": [], TINY: [], **OUTPUT_CODECS}
    every = {"perfed-ckt": outputs, "perfed-kin": outputs, "fedavg": WEIGHT_CODECS}
    return experiments(SETTINGS[what], every, SEEDS)


def conduct(
    name: str, planned: Mapping[tuple[str, str, str, int], Experiment], given: argparse.Namespace
) -> None:
    """Run what is missing, and write down what there is."""
    names = {key: folder_name("-".join(map(str, key))) for key in planned}
    study = Study(ROOT / "runs" / f"bytes-{name}", {names[key]: e for key, e in planned.items()})
    if given.workers > 1 and given.shard is None:
        one = [sys.executable, __file__, *sys.argv[1:], "--shard"]
        shards = [f"{number}/{given.workers}" for number in range(1, given.workers + 1)]
        for process in [subprocess.Popen([*one, shard]) for shard in shards]:
            process.wait()
    else:
        how = Execution(device=given.device, precision=given.precision)
        study.run(how, shard=given.shard, seconds=given.seconds, side_by_side=True)
    if given.shard is not None:
        return
    records = study.records()
    rows = [
        {"setting": setting, "method": method, "codec": codec, "seed": seed, **numbers(records[n])}
        for (setting, method, codec, seed), n in names.items()
        if n in records
    ]
    first = next(iter(planned.values())).to_mapping()
    content = {
        "rows": rows,
        "missing": len(study.missing()),
        "config": {key: first[key] for key in first if key not in ("algorithm", "wire", "seed")},
        "wires": {
            codec: experiment.to_mapping()["wire"]
            for (_, _, codec, _), experiment in planned.items()
        },
        "last": LAST,
        "environment": machines(records)[0],
    }
    path = RESULTS / f"bytes_{name}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    for line in summary(rows):
        print(line)


def numbers(record: Record) -> dict[str, Any]:
    """Accuracies in percent, the mean of the last evaluations; and bytes, of both directions."""
    if "failed" in record:
        return {"failed": record["failed"]}
    kind = next(iter(record["curve"]))
    last = record["curve"][kind][-LAST:]
    traffic = record["summary"]["traffic"]
    return {
        "test": round(100 * statistics.mean(row[1] for row in last), 3),
        "validation": round(100 * statistics.mean(row[2] for row in last), 3),
        "up_bytes": traffic["up_bytes"],
        "down_bytes": traffic["down_bytes"],
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is gained and lost against float32, seed by seed."""
    by = {(r["setting"], r["method"], r["codec"], r["seed"]): r for r in rows if "failed" not in r}
    lines = []
    for setting, method, codec in dict.fromkeys(key[:3] for key in by):
        pairs = [
            (row, by[setting, method, "float32", seed])
            for (*which, seed), row in by.items()
            if which == [setting, method, codec] and (setting, method, "float32", seed) in by
        ]
        if not pairs:
            continue
        fewer = sum(_bytes(b) for _, b in pairs) / sum(_bytes(a) for a, _ in pairs)
        lost = {
            part: statistics.mean(a[part] - b[part] for a, b in pairs)
            for part in ("validation", "test")
        }
        lines.append(
            f"{setting:16} {method:10} {codec:42} 1/{fewer:6.1f}  validation "
            f"{lost['validation']:+.2f}  test {lost['test']:+.2f}  ({len(pairs)} seeds)"
        )
    return lines


def _bytes(row: Mapping[str, Any]) -> int:
    return int(row["up_bytes"] + row["down_bytes"])


# The paper's setting. Outputs are drawn, not trained: how many bytes a code takes depends on how
# sure networks are, so there is a row for each of some degrees. 'cifar' has trained ones.

PUBLIC, CLIENTS, EXCHANGES = 2000, 10, 20  # of a client in the paper's 200 rounds, with C=0.1
FEATURES = 512  # of VGG11
SPREADS = (1.0, 2.0, 4.0)  # of logits
WALK = 0.3  # how far logits move between two messages of a client, as a share of their spread


def paper() -> None:
    """Bytes of a round, of float32 and of 'tiny', beside weights and prototypes."""
    tiny = parse({"link": TINY})
    assert isinstance(tiny, Experiment)
    vgg = _model_bytes()
    rows = []
    for classes, spread in itertools.product((10, 100), SPREADS):
        for method in ("perfed-ckt", "perfed-kin"):
            plain = _exchange_bytes(method, classes, spread, ())
            coded = _exchange_bytes(method, classes, spread, tiny.wire)
            rows.append(
                {
                    "method": method,
                    "classes": classes,
                    "spread": spread,
                    "largest": round(_largest(classes, spread), 3),
                    "float32": CLIENTS * plain,
                    "tiny": CLIENTS * coded,
                }
            )
            print(rows[-1], f"1/{plain / coded:.1f}, FedFomo 1/{2 * vgg / coded:,.0f}")
    prototypes = Message(prototypes=torch.randn(100, FEATURES), counts=torch.ones(100))
    link = Link(tuple(map(stages.build, (number(8), "deflate"))))
    declared = algorithms.build("fedproto").messages().up
    coded = link.send(prototypes, 0, 0, "up", {}, declared, _known(100))[0]
    content = {
        "rows": rows,
        "fedfomo": 2 * CLIENTS * vgg,
        "prototypes": {
            "float32": 2 * CLIENTS * encoded_size(prototypes.arrays),
            "8 bits, deflate": 2 * CLIENTS * encoded_size(coded.arrays),
        },
        "wire": tiny.to_mapping()["wire"],
        "public": PUBLIC,
        "clients": CLIENTS,
        "exchanges": EXCHANGES,
        "walk": WALK,
    }
    path = RESULTS / "bytes_paper.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _model_bytes() -> int:
    """Of one VGG11, as FedFomo sends it."""
    experiment = parse({"models": ["vgg11-bn"], "algorithm": "fedfomo"})
    assert isinstance(experiment, Experiment)
    module = build_module(experiment.models.architectures[0], (3, 32, 32), 10)
    arrays = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return encoded_size(arrays)


def _known(classes: int) -> Known:
    return Known({"P": PUBLIC, "N": classes, "F": FEATURES}, 500, lambda _: Weights({}, {}))


def _logits(classes: int, spread: float) -> Iterator[torch.Tensor]:
    """What a client says of the public set, message after message."""
    random = torch.Generator().manual_seed(0)
    now = torch.randn(PUBLIC, classes, generator=random)
    while True:
        yield spread * now
        step = torch.randn(PUBLIC, classes, generator=random)
        now = (1 - WALK**2) ** 0.5 * now + WALK * step


def _largest(classes: int, spread: float) -> float:
    return float(next(_logits(classes, spread)).softmax(1).amax(1).mean())


def _exchange_bytes(method: str, classes: int, spread: float, wire: Sequence[Stage]) -> int:
    """Up and down, the mean of as many exchanges as a client of the paper has."""
    link, declared = Link(tuple(wire)), algorithms.build(method).messages()
    client, server, total = {}, {}, 0
    logits = itertools.islice(_logits(classes, spread), 4 * EXCHANGES)
    for round, (own, *others) in enumerate(zip(*[logits] * 4, strict=True)):
        gains = torch.zeros(3, 4)
        if method == "perfed-ckt":
            up = Message(soft_decisions=own.softmax(1))
            down = Message(centroids=torch.stack(others).softmax(2))
        else:
            up = Message(soft_decisions=own.softmax(1), samples=500, gains=gains)
            evidence, mix = others[0] - others[0].mean(1, keepdim=True), own.softmax(1).mean(0)
            down = Message(evidence=evidence, gains=gains, mix=mix)
        known = _known(classes)
        sent, server = link.send(down, 0, round, "down", server, declared.down, known)
        _, client = link.receive(sent, 0, round, "down", client, declared.down, known)
        answer, client = link.send(up, 0, round, "up", client, declared.up, known)
        _, server = link.receive(answer, 0, round, "up", server, declared.up, known)
        total += encoded_size(sent.arrays) + encoded_size(answer.arrays)
    return total // EXCHANGES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["tune", "digits", "cifar", "paper"])
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--method", help="only this one; without it all are written down")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with a core")
    parser.add_argument("--shard", type=Shard.parse, help="1/4, say: what a worker is given")
    given = parser.parse_args()
    if given.what == "paper":
        paper()
        return
    planned = wanted(given.what)
    conduct(given.what, {k: e for k, e in planned.items() if given.method in (None, k[1])}, given)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
