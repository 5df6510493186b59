"""Who finds kin, and who is harmed? PerFed-Kin beside the other methods where clients differ in
what labels or pictures mean, and where they do not.

    python benchmarks/kin.py tune digits          λ of the methods that have one, by validation data
    python benchmarks/kin.py run digits           results with it, on seeds that tuned nothing
    python benchmarks/kin.py run digits 1/4 …     the first of four shards; the others elsewhere
    python benchmarks/kin.py gather digits        the record, from all that has been run

Of some methods or settings only: methods=local+kin settings=IID+noise; then ``gather`` makes the
record. On many cores: workers=14, each a process of its own. Nothing more is begun after some time:
seconds=600. Runs and their records go to runs/, or elsewhere: out=FOLDER.

A family is a set of data and one network for all, or three (``digits-three``). ``cifar`` and
``cifar-three`` are for a GPU: add device=cuda. Stopped, it goes on where it was. In ``digits-own``
and ``digits-three-own`` clients are judged by their own few test samples, to see what that changes:
methods=local+kin.

Local training here is of the same clients at the same times as in the methods. ``oracle`` is
PerFed-Kin with the true groups given: no method, but a bound for finding them. What PerFed-Kin has
beside PerFed-CKT is also given to PerFed-CKT, one at a time: memory, gate, kin.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from committed import ROOT, result
from torch import Tensor

from perfed import Execution, Experiment
from perfed.algorithms.clustering import cmeans, nearest
from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.algorithms.perfed_evidence import (
    PRIOR_SAMPLES,
    PerFedEvidence,
    choice,
    label_mix,
    trial,
)
from perfed.algorithms.perfed_kin import PerFedKin, bounded, found_kinds, prior
from perfed.algorithms.witnesses import Witnesses
from perfed.core.algorithm import (
    Adjusted,
    Client,
    ClientInfo,
    Mixture,
    Predictor,
    Reply,
    Server,
    algorithms,
    supervised,
)
from perfed.core.declaration import Messages
from perfed.core.message import Message
from perfed.core.schema import from_mapping, option
from perfed.core.tree import Tree, Weights
from perfed.runs.result import headline_kind
from perfed.runs.study import Record, Shard, Study, folder_name, machines

RESULTS = ROOT / "benchmarks" / "results"
TUNING_SEEDS = (1000, 1001)
SEEDS = {"digits": (96, 97, 98, 99, 100), "cifar": (51, 52, 53, 54, 55)}
"""By what a family's name begins with. None of them had a say in the method."""


@algorithms.register("kin-oracle")
@dataclass(frozen=True)
class Oracle(PerFedKin):
    groups: tuple[int, ...] = option((), "the true group of each client")

    def kinds(self, said: Witnesses, clients: Sequence[int]) -> Tensor:
        true = torch.tensor([self.groups[client] for client in clients])
        kinds: Tensor = torch.unique(true, return_inverse=True)[1]
        return kinds


@algorithms.register("kin-trusting")
@dataclass(frozen=True)
class Trusting(PerFedKin):
    """Without the question how well a client fits in."""

    def expected(self, said: Witnesses, kind: Tensor, gains: Tensor) -> Tensor:
        return prior(gains, kind, torch.ones(len(kind)))


@algorithms.register("kin-by-validation")
@dataclass(frozen=True)
class ByValidation(PerFedKin):
    """A client's training samples do not speak in its gate."""

    def at_home(self, client: Client, student: Weights, log_mix: Tensor) -> float:
        return 0.0


@algorithms.register("kin-own-labels")
@dataclass(frozen=True)
class OwnLabels(PerFedKin):
    """A client knows of its label mix what its own labels say."""

    def mix(self, client: Client, message: Message) -> Tensor:
        return label_mix(client.label_counts())


@algorithms.register("kin-forgetful")
@dataclass(frozen=True)
class Forgetful(PerFedKin):
    """The server remembers only who spoke in this round."""

    def remembered(self, bank: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        return dict(now)


@algorithms.register("ckt-memory")
@dataclass(frozen=True)
class CKTWithMemory(PerFedCKT):
    """The server clusters what everybody said last."""

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        now = {str(r.client.id): r.message["soft_decisions"] for r in replies}
        bank = state.get("bank", {}) | now
        everybodys = torch.stack([*bank.values()])
        return {
            "bank": bank,
            "centroids": cmeans(everybodys, self.clusters, server.random("c-means")),
        }


@algorithms.register("ckt-kin")
@dataclass(frozen=True)
class CKTWithKin(PerFedCKT):
    """The mean opinion of a client's kind, as PerFed-Kin finds it, in place of c centroids."""

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        now = {
            str(r.client.id): {**r.message.arrays, "samples": torch.tensor(float(r.client.samples))}
            for r in replies
        }
        bank = state.get("bank", {}) | now
        decisions = torch.stack([sent["soft_decisions"] for sent in bank.values()])
        samples = torch.stack([sent["samples"] for sent in bank.values()])
        said = Witnesses.hear(decisions, bounded(samples))
        kind = found_kinds(said, PerFedKin().standard_errors)
        means = torch.stack(
            [decisions[kind == group].mean(0) for group in range(int(kind.max()) + 1)]
        )
        kinds = {name: kind[row] for row, name in enumerate(bank)}
        return {"bank": bank, "centroids": means, "kind": kinds}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        kind = int(state["kind"].get(str(client.id), 0))
        return Message(centroids=state["centroids"][kind][None])


@algorithms.register("ckt-gate")
@dataclass(frozen=True)
class CKTWithGate(PerFedCKT):
    """The taught model beside one trained alone, and PerFed-Evidence's gate between them."""

    uses_validation = True

    def messages(self) -> Messages:
        ours, gains = super().messages(), (PerFedEvidence().messages().up or {})["gains"]
        up, down = (entries or {} for entries in (ours.up, ours.down))
        return Messages(up={**up, "gains": gains}, down={**down, "gains": gains}, evaluation={})

    def first_message(self, client: Client) -> Message:
        untried = PerFedEvidence().first_message(client)["gains"]
        return Message(soft_decisions=client.soft_decisions(), gains=untried)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        told = state.get("told", {}) | {str(r.client.id): r.message["gains"] for r in replies}
        mean = torch.stack([*told.values()]).mean(0)
        return super().merge(server, state, replies) | {"told": told, "gains": mean}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(centroids=state["centroids"], gains=state["gains"])

    def client_round(self, client: Client, message: Message) -> Message:
        student = client.state.get("student", client.weights)
        cluster = nearest(message["centroids"], client.soft_decisions(student))
        student = client.sgd(student, self.objective, message["centroids"][cluster], stream=0)
        client.weights = client.sgd(client.weights, supervised, stream=0)
        gains, samples = trial(client, student, self.no_mix(client), "validation")
        proof = gains * samples + PRIOR_SAMPLES * message["gains"]
        client.state = {"student": student, "proof": proof}
        return Message(soft_decisions=client.soft_decisions(student), gains=gains)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        if not client.state:
            return {"personal": client.weights}
        share, sharpness = choice(client.state["proof"], PerFedEvidence().caution)
        student = Adjusted(client.state["student"], sharpness, self.no_mix(client))
        mixed = Mixture((client.weights, student), torch.stack([1 - share, share]))
        return {"personal": mixed}

    def no_mix(self, client: Client) -> Tensor:
        """A student of opinions has its label mix in its logits."""
        return torch.zeros_like(client.label_counts(), dtype=torch.get_default_dtype())


DIGITS = {
    "name": "kin",
    "rounds": 60,
    "evaluate_every": 60,
    "clients": 30,
    "clients_per_round": 10,
    "selection": "uniform",
    "data": {"name": "digits", "public": 400},
    "shared_test": True,
    "fresh_mix": "held",
    "models": {"architectures": [{"name": "mlp", "hidden": [64]}]},
    "training": {"learning_rate": 0.1, "steps": 10, "batch_size": 32, "public_batch_size": 64},
}
CIFAR = {
    "name": "kin",
    "rounds": 60,
    "evaluate_every": 60,
    "clients": 20,
    "clients_per_round": 10,
    "selection": "uniform",
    "data": {"name": "cifar10", "public": 1000, "samples": 20000},
    "fresh_test": 1000,
    "fresh_mix": "held",
    "models": {"architectures": [{"name": "cnn", "batchnorm": True}]},
    "training": {"learning_rate": 0.05, "steps": 20, "batch_size": 32, "public_batch_size": 64},
}
THREE_OF_DIGITS = [
    {"name": "mlp", "hidden": [64]},
    {"name": "mlp", "hidden": [128, 64]},
    {"name": "cnn", "batchnorm": True},
]
THREE_OF_PICTURES = [{"name": "cnn", "batchnorm": True}, "cnn4", "resnet8"]
FAMILIES: dict[str, dict[str, Any]] = {
    "digits": DIGITS,
    "digits-three": DIGITS | {"models": {"architectures": THREE_OF_DIGITS}},
    "cifar": CIFAR,
    "cifar-three": CIFAR | {"models": {"architectures": THREE_OF_PICTURES}},
}
OWN_TESTS = {"shared_test": False}
FAMILIES |= {f"{name}-own": FAMILIES[name] | OWN_TESTS for name in ("digits", "digits-three")}
IID = {"name": "iid"}
SKEWED = {"name": "dirichlet", "minimum": 20}
TURNED = {"name": "rotation", "groups": [1, 1, 1, 1]}


class Setting(NamedTuple):
    partition: dict[str, Any]
    shift: dict[str, Any] | None = None

    @property
    def groups(self) -> int:
        return len(self.shift["groups"]) if self.shift else 1


SETTINGS: dict[str, Setting] = {
    "IID": Setting(IID),
    "Dir(0.5)": Setting(SKEWED | {"alpha": 0.5}),
    "Dir(0.1)": Setting(SKEWED | {"alpha": 0.1}),
    "Dir(0.01)": Setting(SKEWED | {"alpha": 0.01}),
    "Dir(0.01), not repaired": Setting(SKEWED | {"alpha": 0.01, "repair": False}),
    "latent groups": Setting({"name": "groups", "groups": 3}),
    "labels permuted": Setting(IID, {"name": "labels", "groups": [1, 1, 1]}),
    "labels permuted, Dir(0.3)": Setting(
        SKEWED | {"alpha": 0.3}, {"name": "labels", "groups": [1, 1, 1]}
    ),
    "rotated, public set too": Setting(IID, TURNED | {"public": True}),
    "rotated": Setting(IID, TURNED),
    "noise": Setting(IID, {"name": "noise", "groups": [1, 1, 1]}),
    "contrast": Setting(IID, {"name": "contrast", "groups": [1, 1, 1]}),
    "20 % with other labels": Setting(IID, {"name": "labels", "groups": [8, 2]}),
    "10 % with other labels": Setting(IID, {"name": "labels", "groups": [9, 1]}),
    "one with other labels": Setting(IID, {"name": "labels", "groups": [0, 1]}),
}
WEIGHTS = {"perfed-ckt": (0.1, 0.5, 2.0, 8.0, 32.0), "ditto": (0.1, 1.0, 10.0)}
"""What is tried for λ. 128 was far worse in every setting of successor.py where 32 was the best."""
CLUSTERS = (1, 2, 3, 4)
GIVEN = ("memory", "gate", "kin")
NARROWED = ("methods", "settings")


def seeds(family: str) -> tuple[int, ...]:
    return SEEDS[family.partition("-")[0]]


def experiment(family: str, setting: str, algorithm: Mapping[str, Any], seed: int) -> Experiment:
    values = FAMILIES[family] | {"partition": SETTINGS[setting].partition}
    shift = SETTINGS[setting].shift
    if shift is not None and shift["groups"][0] == 0:
        shift = shift | {"groups": [values["clients"] - 1, 1]}
    return from_mapping(
        Experiment, values | {"shift": shift, "algorithm": dict(algorithm), "seed": seed}
    )


def tried(method: str) -> Iterator[dict[str, Any]]:
    """Every setting of a method that is tuned."""
    for weight in WEIGHTS[method]:
        for clusters in CLUSTERS if method == "perfed-ckt" else (0,):
            yield {"name": method, "weight": weight} | ({"clusters": clusters} if clusters else {})


def label(algorithm: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in algorithm.values())


def trials(family: str) -> dict[str, Experiment]:
    return {
        run_name(setting, label(algorithm), seed): experiment(family, setting, algorithm, seed)
        for setting in SETTINGS
        for method in WEIGHTS
        for algorithm in tried(method)
        for seed in TUNING_SEEDS
    }


def run_name(setting: str, method: str, seed: int) -> str:
    return folder_name(f"{setting}-{method}-seed{seed}")


def chosen(family: str, records: Mapping[str, Record]) -> dict[str, dict[str, float]]:
    """For each setting the λ of each method, PerFed-CKT's for each c."""
    found: dict[str, dict[str, float]] = {}
    for setting in SETTINGS:
        scores: dict[str, dict[float, float]] = {}
        for method in WEIGHTS:
            for algorithm in tried(method):
                names = [run_name(setting, label(algorithm), seed) for seed in TUNING_SEEDS]
                score = statistics.mean(validation_accuracy(records[name]) for name in names)
                clusters = algorithm.get("clusters")
                key = method if clusters is None else f"c={clusters}"
                scores.setdefault(key, {})[algorithm["weight"]] = score
        found[setting] = {key: max(of, key=lambda w: of[w]) for key, of in scores.items()}
    return found


def validation_accuracy(record: Record) -> float:
    """Of the last round; of a run that diverged, nothing."""
    if "summary" not in record:
        return 0.0
    models = record["summary"]["models"]
    accuracy: float = models[headline_kind(models)]["last"]["validation_accuracy"]
    return accuracy


def all_methods(family: str, setting: str, seed: int) -> dict[str, dict[str, Any]]:
    """By name. Those with a λ only where it has been tuned."""
    found: dict[str, dict[str, Any]] = {
        "local": {"name": "local", "participation": "selected"},
        "kin": {"name": "perfed-kin"},
        "evidence": {"name": "perfed-evidence"},
        "hypcluster c=3": {"name": "hypcluster", "clusters": 3},
        "fedavg-ft": {"name": "fedavg-ft"},
        "fedavg": {"name": "fedavg"},
        "fedfomo": {"name": "fedfomo"},
        "fedfomo, trained kept": {"name": "fedfomo", "fallback": "trained"},
        "forgetful": {"name": "kin-forgetful"},
        "trusting": {"name": "kin-trusting"},
        "by validation": {"name": "kin-by-validation"},
        "own labels": {"name": "kin-own-labels"},
    }
    if SETTINGS[setting].groups not in (1, 3):
        right = SETTINGS[setting].groups
        found["hypcluster, right c"] = {"name": "hypcluster", "clusters": right}
    shift = experiment(family, setting, found["local"], seed).shift
    if shift is not None:
        groups = shift.deal(FAMILIES[family]["clients"], seed)
        found["oracle"] = {"name": "kin-oracle", "groups": [int(group) for group in groups]}
    if (RESULTS / f"kin_tune_{family}.json").is_file():
        weights = result(f"kin_tune_{family}")["chosen"][setting]
        found["ditto"] = {"name": "ditto", "weight": weights["ditto"]}
        for clusters in CLUSTERS:
            name = f"c={clusters}"
            options = {"clusters": clusters, "weight": weights[name]}
            found[name] = {"name": "perfed-ckt"} | options
        for part in GIVEN:
            options = {"clusters": 3, "weight": weights["c=3"]}
            found[f"c=3, {part}"] = {"name": f"ckt-{part}"} | options
    return found


def cells(
    family: str, methods: Sequence[str] = (), settings: Sequence[str] = ()
) -> dict[str, Experiment]:
    """All of them, or those of some methods and settings."""
    return {
        run_name(setting, method, seed): experiment(family, setting, algorithm, seed)
        for seed in seeds(family)
        for setting in settings or SETTINGS
        for method, algorithm in all_methods(family, setting, seed).items()
        if not methods or method in methods
    }


def refuse_unknown(family: str, narrowed: Mapping[str, Sequence[str]]) -> None:
    """A name that does not exist would be nothing to run, and then an empty record."""
    known = {
        "methods": [name for of in SETTINGS for name in all_methods(family, of, seeds(family)[0])],
        "settings": [*SETTINGS],
    }
    for key, names in narrowed.items():
        for name in names:
            if name not in known[key]:
                there = "; ".join(dict.fromkeys(known[key]))
                print(f"{key}={name}: there is no such name; there are {there}", file=sys.stderr)
                sys.exit(2)


def gathered(family: str, records: Mapping[str, Record]) -> dict[str, Any]:
    rows = []
    for setting in SETTINGS:
        for method in all_methods(family, setting, seeds(family)[0]):
            row = _row(family, setting, method, records)
            if row["seeds"]:
                rows.append({"setting": setting, "method": method} | row)
    return {"rows": rows, "seeds": seeds(family), "tuning_seeds": TUNING_SEEDS}


def _row(family: str, setting: str, method: str, records: Mapping[str, Record]) -> dict[str, Any]:
    """Of every client of every seed: points above its local model, group, made by the repair."""
    ran, accuracy, clients, sent = [], [], [], []
    for seed in seeds(family):
        local = records.get(run_name(setting, "local", seed))
        record = records.get(run_name(setting, method, seed))
        if not (local and record and "summary" in record and "summary" in local):
            continue
        reached = record["clients"]["test_accuracy"][headline_kind(record["summary"]["models"])]
        alone = local["clients"]["test_accuracy"]["personal"]
        everyone = range(len(reached))
        groups = record["clients"].get("group", [0] * len(reached))
        repaired = record["clients"].get("repaired", [False] * len(reached))
        ran.append(seed)
        accuracy.append(round(statistics.mean(reached), 5))
        clients.append(
            [
                [round(100 * (reached[k] - alone[k]), 2), groups[k], int(repaired[k])]
                for k in everyone
            ]
        )
        traffic = record["summary"]["traffic"]
        sent.append((traffic["up_bytes"] + traffic["down_bytes"]) / record["config"]["rounds"])
    per_round = round(statistics.mean(sent)) if sent else 0
    return {"seeds": ran, "accuracy": accuracy, "clients": clients, "bytes_per_round": per_round}


def write(
    name: str, content: Mapping[str, Any], family: str, records: Mapping[str, Record]
) -> None:
    settings = {name: setting._asdict() for name, setting in SETTINGS.items()}
    origin = {"config": FAMILIES[family], "settings": settings, "environments": machines(records)}
    path = RESULTS / f"{name}_{family}.json"
    path.write_text(json.dumps({**content, **origin}, separators=(",", ":")) + "\n", "utf-8")


def main(action: str, family: str, *rest: str) -> None:
    options = dict(part.split("=", 1) for part in rest if "=" in part)  # device=cuda seconds=300
    shard = next((Shard.parse(part) for part in rest if "/" in part and "=" not in part), None)
    workers = int(options.pop("workers", 1))
    seconds = float(options.pop("seconds", "inf"))
    narrowed = {key: options.pop(key).split("+") for key in NARROWED if key in options}
    refuse_unknown(family, narrowed)
    out = Path(options.pop("out", ROOT / "runs"))
    how = Execution(**options)  # type: ignore[arg-type]
    tuning = "tune" in (action, *rest)  # and: gather digits tune
    folder = out / f"kin-{'tune-' if tuning else ''}{family}"
    study = Study(folder, trials(family) if tuning else cells(family, **narrowed))
    if action != "gather" and workers > 1:
        one = [sys.executable, __file__, action, family, *rest, "workers=1"]
        parts = [[*one, f"{number}/{workers}"] for number in range(1, workers + 1)]
        for process in [subprocess.Popen(part) for part in parts]:
            process.wait()
    elif action != "gather":
        study.run(how, shard=shard, seconds=seconds, side_by_side=how.device == "cuda")
    if shard is not None:
        return
    records = study.records()
    if tuning and not study.missing():
        content = {"chosen": chosen(family, records), "tried": WEIGHTS}
        write("kin_tune", content, family, records)
    if not tuning and (action == "gather" or not (narrowed or study.missing())):
        write("kin", gathered(family, records), family, records)


if __name__ == "__main__":
    main(*sys.argv[1:])
