"""Who should speak: the models that are taught, or models that are trained alone?

    python benchmarks/first_hand.py    a quarter of an hour on one core

Handwritten digits, a CNN with BatchNorm, the seeds that settings are chosen by. What is judged is
the taught model alone, without the mixture that PerFed-Evidence predicts with. With an MLP (see
screening.py) it makes little difference; the more layers there are to train, the more.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import torch
from committed import ROOT
from successor import CNN, DIGITS, PARTITIONS, TUNING_SEEDS
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed import Execution, Experiment
from perfed.algorithms.perfed_evidence import PerFedEvidence, label_mix
from perfed.core.algorithm import (
    Adjusted,
    Client,
    Judged,
    Network,
    Private,
    Public,
    algorithms,
)
from perfed.core.message import Message
from perfed.core.schema import from_mapping, option
from perfed.runs.study import Study

SETTINGS = ("3 groups", "Dir(0.1)", "Dir(1)")
VARIANTS: dict[str, dict[str, Any]] = {
    "those who are taught, squares, λ=8": {"weight": 8.0, "squares": True, "hearsay": True},
    "models trained alone, squares, λ=8": {"weight": 8.0, "squares": True},
    "those who are taught, KL, λ=2": {"hearsay": True},
    "models trained alone, KL, λ=2": {},
}


@algorithms.register("student")
@dataclass(frozen=True)
class Student(PerFedEvidence):
    """PerFed-Evidence's taught model."""

    hearsay: bool = option(False, "taught models speak")
    squares: bool = option(False, "the squared distance of probabilities instead of KL")

    def message(self, client: Client, gains: Tensor) -> Message:
        sent = super().message(client, gains)
        if not self.hearsay or "student" not in client.state:
            return sent
        mix = label_mix(client.label_counts())
        spoken = client.soft_decisions(client.state["student"]) * mix
        return Message(**dict(sent) | {"soft_decisions": spoken / spoken.sum(1, keepdim=True)})

    def lesson(
        self,
        model: Network,
        private: Private,
        public: Public,
        log_mix: Tensor,
        log_attention: Tensor,
        teacher: Tensor,
    ) -> Tensor:
        if not self.squares:
            return super().lesson(model, private, public, log_mix, log_attention, teacher)
        said = (model.public(public.x) + log_attention).softmax(1)
        distance = (said - teacher[public.index]).square().sum(1).mean()
        return cross_entropy(model(private.x) + log_mix, private.y) + self.weight * distance

    def models(self, client: Client, message: Message) -> dict[str, Judged]:
        log_mix = label_mix(client.label_counts()).log()
        student = client.state.get("student", client.weights)
        return {"personal": Adjusted(student, torch.ones(()), log_mix)}


def main() -> None:
    torch.set_num_threads(1)
    methods = {"local": {"name": "local", "participation": "drawn"}} | {
        name: {"name": "student"} | options for name, options in VARIANTS.items()
    }
    base = DIGITS | {"models": {"architectures": [CNN]}}
    experiments = {
        f"{setting}-{number}-seed{seed}": from_mapping(
            Experiment,
            base | {"partition": PARTITIONS["digits"][setting], "algorithm": method, "seed": seed},
        )
        for setting in SETTINGS
        for number, method in enumerate(methods.values())
        for seed in TUNING_SEEDS
    }
    began = time.perf_counter()
    study = Study(ROOT / "runs" / "first-hand", experiments)
    study.run(Execution())
    records = study.records()
    rows = [
        {
            "setting": setting,
            "method": method,
            "accuracy": [
                round(_accuracy(records[f"{setting}-{number}-seed{seed}"]), 5)
                for seed in TUNING_SEEDS
            ],
        }
        for setting in SETTINGS
        for number, method in enumerate(methods)
    ]
    first = next(iter(records.values()))
    content = {
        "rows": rows,
        "config": base,
        "seeds": TUNING_SEEDS,
        "environment": first["environment"],
    }
    path = ROOT / "benchmarks" / "results" / "first_hand.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{time.perf_counter() - began:.0f} s")


def _accuracy(record: dict[str, Any]) -> float:
    accuracy: float = record["summary"]["models"]["personal"]["last"]["test_accuracy"]
    return accuracy


if __name__ == "__main__":
    main()
