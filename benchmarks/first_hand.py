"""Who should speak: the models that are taught, or models that are trained alone?

    python benchmarks/first_hand.py digits    a quarter of an hour on one core
    python benchmarks/first_hand.py cifar     half an hour

A CNN with BatchNorm, the seeds that settings are chosen by. What is evaluated is the taught model
alone, without the mixture that PerFed-Evidence predicts with. With an MLP (see screening.py) it
makes little difference. And a bound: a teacher that was trained on the samples of all clients,
which nobody in this frame can have.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import successor
import torch
from committed import ROOT
from successor import PARTITIONS, TUNING_SEEDS
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed import Execution, Experiment, architectures
from perfed.algorithms.perfed_evidence import PerFedEvidence, label_mix, pooled_evidence
from perfed.core.algorithm import (
    Adjusted,
    Client,
    Predictor,
    Reply,
    Server,
    algorithms,
)
from perfed.core.message import Message
from perfed.core.schema import from_mapping, option
from perfed.core.tree import Tree
from perfed.data import build_federation
from perfed.models import build_module
from perfed.runs.study import Study

CNN = {"name": "cnn", "batchnorm": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "digits": successor.FAMILIES["digits"] | {"models": {"architectures": [CNN]}},
    "cifar": successor.FAMILIES["cifar"] | successor.JUDGES["own"],
}
SETTINGS = {"digits": ("3 groups", "Dir(0.1)", "Dir(1)"), "cifar": ("5 groups", "Dir(0.1)")}
VARIANTS: dict[str, dict[str, Any]] = {
    "those who are taught, squares, λ=8": {"weight": 8.0, "squares": True, "hearsay": True},
    "models trained alone, squares, λ=8": {"weight": 8.0, "squares": True},
    "those who are taught, KL, λ=2": {"hearsay": True},
    "models trained alone, KL, λ=2": {},
}
BOUND = "one trained on everybody's data (a bound, no method), KL, λ=2"
CENTRAL_STEPS = 1500


@algorithms.register("student")
@dataclass(frozen=True)
class Student(PerFedEvidence):
    """PerFed-Evidence's taught model."""

    hearsay: bool = option(False, "taught models speak")
    squares: bool = option(False, "the squared distance of probabilities instead of KL")
    teacher: str = option("", "a file with soft decisions to teach instead of what clients say")

    def message(self, client: Client, gains: Tensor) -> Message:
        sent = super().message(client, gains)
        if not self.hearsay or "student" not in client.state:
            return sent
        mix = label_mix(client.label_counts())
        spoken = client.soft_decisions(client.state["student"]) * mix
        return Message(**dict(sent) | {"soft_decisions": spoken / spoken.sum(1, keepdim=True)})

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        merged = super().merge(server, state, replies)
        if self.teacher:
            merged["evidence"] = pooled_evidence(torch.load(self.teacher)[None], torch.ones(1))
        return merged

    def disagreement(self, said: Tensor, taught: Tensor) -> Tensor:
        if self.squares:
            return (said.softmax(1) - taught).square().sum(1).mean()
        return super().disagreement(said, taught)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        log_mix = label_mix(client.label_counts()).log()
        student = client.state.get("student", client.weights)
        return {"personal": Adjusted(student, torch.ones(()), log_mix)}


def central_teacher(experiment: Experiment, path: Path) -> None:
    """Soft decisions of one network that was trained on the training samples of all clients."""
    e = experiment
    federation = build_federation(e.data, e.partition, e.split, e.clients, e.seed)
    held = np.concatenate([split.train for split in federation.splits])
    x = torch.tensor(federation.samples.numbers(federation.samples.x[held])).float()
    y = torch.tensor(federation.samples.y[held]).long()
    torch.manual_seed(e.seed)
    network = build_module(architectures.build(CNN), federation.inputs, federation.samples.classes)
    optimizer = torch.optim.SGD(network.parameters(), e.training.learning_rate)
    for _ in range(CENTRAL_STEPS):
        batch = torch.randint(len(y), (64,))
        optimizer.zero_grad()
        cross_entropy(network(x[batch]), y[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        public = federation.samples.numbers(federation.samples.public_x)
        said = network.eval()(torch.tensor(public).float()).softmax(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(said, path)


def study(family: str, folder: Path) -> tuple[dict[tuple[str, str, int], str], Study]:
    """What to run, and under which name each setting, method and seed is found."""
    names, experiments = {}, {}
    for setting in SETTINGS[family]:
        base = FAMILIES[family] | {"partition": PARTITIONS[family][setting]}
        for seed in TUNING_SEEDS:
            teacher = folder / "teachers" / f"{setting}-{seed}.pt"
            methods: dict[str, dict[str, Any]] = {
                "local": {"name": "local", "participation": "selected"},
                **{name: {"name": "student", **options} for name, options in VARIANTS.items()},
                BOUND: {"name": "student", "teacher": str(teacher)},
            }
            for number, (method, algorithm) in enumerate(methods.items()):
                name = f"{setting}-{number}-seed{seed}"
                values = base | {"algorithm": algorithm, "seed": seed}
                experiments[name] = from_mapping(Experiment, values)
                names[setting, method, seed] = name
            if not teacher.is_file():
                central_teacher(experiments[names[setting, "local", seed]], teacher)
    return names, Study(folder, experiments)


def main(family: str) -> None:
    torch.set_num_threads(1)
    began = time.perf_counter()
    names, runs = study(family, ROOT / "runs" / f"first-hand-{family}")
    runs.run(Execution())
    records = runs.records()
    rows: dict[tuple[str, str], list[float]] = {}
    for (setting, method, _), name in names.items():
        accuracy = records[name]["summary"]["models"]["personal"]["last"]["test_accuracy"]
        rows.setdefault((setting, method), []).append(round(accuracy, 5))
    content = {
        "rows": [
            {"setting": setting, "method": method, "accuracy": accuracies}
            for (setting, method), accuracies in rows.items()
        ],
        "config": FAMILIES[family],
        "seeds": TUNING_SEEDS,
        "environment": next(iter(records.values()))["environment"],
    }
    path = ROOT / "benchmarks" / "results" / f"first_hand_{family}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
