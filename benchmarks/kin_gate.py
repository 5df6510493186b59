"""How should PerFed-Kin's gate decide? Judged by validation samples of tuning seeds alone.

    python benchmarks/kin_gate.py             runs what is missing, then judges; twenty minutes
    python benchmarks/kin_gate.py 1/2         the first half of the runs; the second elsewhere

What clients learn does not depend on the gate. So each setting is run once, and what a gate decides
by is kept: what clients said last, and what both models of each client make of its samples. Every
gate is then judged by the validation samples of all *other* clients, as this client would see them
(in its group's way, each label in proportion to the client's mix): its gate has not heard of them,
and they are some 135, where its own are five.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from committed import ROOT
from kin import RESULTS, SETTINGS, experiment
from torch import Tensor
from torch.func import functional_call

from perfed import Execution, Experiment
from perfed.algorithms.perfed_evidence import (
    FLOOR,
    PRIOR_SAMPLES,
    SHARES,
    SHARPNESS,
    choice,
)
from perfed.algorithms.perfed_kin import PerFedKin, bounded, kinship, prior
from perfed.algorithms.witnesses import Witnesses
from perfed.core.algorithm import Client, Predictor, algorithms
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.data import Federation
from perfed.data.shift import Shifting
from perfed.runs.directory import environment
from perfed.runs.simulation import Simulation
from perfed.runs.study import Shard, folder_name

FAMILIES = ("digits", "digits-three")
SEEDS = range(1000, 1006)
FOLDER = ROOT / "runs" / "kin-gate"
CAUTION = PerFedKin().caution
PARTS = ("train", "validation", "others")
MODELS = ("witness", "student")


@algorithms.register("kin-observed")
@dataclass(frozen=True)
class Observed(PerFedKin):
    """Both models of a client by themselves."""

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        student = client.state.get("student", client.weights)
        return {"personal": client.weights, "student": student}


def collect(family: str, setting: str, seed: int, path: Path) -> None:
    what = experiment(family, setting, {"name": "kin-observed"}, seed)
    simulation, channel = Simulation(what, how=Execution(engine="stacked", device="cpu")), Channel()
    simulation.begin(channel)
    for number in range(what.rounds):
        simulation.play_round(number, channel)
    last = what.rounds - 1
    messages = simulation.evaluation_messages(last)
    (made,) = simulation.engine.perform([simulation.population.call("models", messages, last)])
    state, federation = simulation.progress.state, simulation.federation
    plain = replace(what, shift=None).federation()
    kept = []
    for name, sent in state["bank"].items():
        client = int(name)
        module = simulation.population.modules[simulation.population.architectures[client]]
        said = {}
        for part, x, y in samples(what, federation, plain, client):
            said[f"{part}_labels"] = torch.as_tensor(y)
            for model, weights in zip(MODELS, made[client].values(), strict=True):
                tensors = weights.params | weights.buffers
                with torch.no_grad():
                    said[f"{part}_{model}"] = functional_call(module.eval(), tensors, (x,)).double()
        split = federation.splits[client]
        held = torch.as_tensor(federation.samples.y[np.concatenate([*vars(split).values()])])
        classes = federation.samples.classes
        # Who was heard once has not been taught yet.
        expected = simulation.population.record(client).state.get("mix", torch.ones(classes))
        kept.append(
            said
            | {name: torch.as_tensor(sent[name]) for name in ("soft_decisions", "samples", "gains")}
            | {
                "kind": torch.as_tensor(state["kind"][name]),
                "group": torch.as_tensor(federation.groups[client]),
                "mix": torch.bincount(held, minlength=classes) / len(held),
                "log_mix": expected.log(),
            }
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(kept, path)


def samples(
    what: Experiment, federation: Federation, plain: Federation, client: int
) -> Iterator[tuple[str, Tensor, np.ndarray]]:
    """A client's own, and the validation samples of all others as it would see them: they are taken
    from the same federation without a shift."""
    split, held = federation.splits[client], federation.samples
    for part in PARTS[:2]:
        where = getattr(split, part)
        yield part, torch.as_tensor(held.x[where]), held.y[where]
    others = [plain.splits[k].validation for k in range(plain.clients) if k != client]
    x, y = (of[np.concatenate(others)] for of in (plain.samples.x, plain.samples.y))
    if what.shift is not None:
        shifting = Shifting.of(
            what.shift, plain.clients, plain.inputs, plain.samples.classes, what.seed
        )
        x, y = shifting.fresh(int(shifting.groups[client]), x, y)
    yield PARTS[2], torch.as_tensor(np.ascontiguousarray(x)), y


class Case:
    """What a gate knows of a client, and what its choice would bring."""

    def __init__(self, kept: dict[str, Tensor], expected: Tensor, trusting: Tensor) -> None:
        self.expected, self.trusting = expected, trusting
        self.validation = gains(kept, "validation").sum(2)
        self.training = gains(kept, "train").mean(2)
        self.gain = _gain_in_accuracy(kept)
        self.group = int(kept["group"])


def probabilities(kept: dict[str, Tensor], part: str) -> tuple[Tensor, Tensor]:
    """Of the witness, (sample, class), and of every choice of β and w, (β, w, sample, class)."""
    alone = kept[f"{part}_witness"].softmax(1)
    sharpness, shares = torch.tensor(SHARPNESS).double(), torch.tensor(SHARES).double()
    logits = sharpness[:, None, None] * kept[f"{part}_student"] + kept["log_mix"].double()
    taught, share = logits.softmax(2)[:, None], shares[:, None, None]
    return alone, (1 - share) * alone + share * taught


def gains(kept: dict[str, Tensor], part: str) -> Tensor:
    """Gains in log-likelihood, (β, w, sample)."""
    alone, mixed = probabilities(kept, part)
    label = kept[f"{part}_labels"][:, None]
    own = (alone.gather(1, label)[:, 0] + FLOOR).log()
    where = label.expand(*mixed.shape[:2], *label.shape)
    return (mixed.gather(3, where)[..., 0] + FLOOR).log() - own


def _gain_in_accuracy(kept: dict[str, Tensor]) -> Tensor:
    """In points, of each choice, by the others' samples with the client's mix."""
    labels = kept["others_labels"]
    there = torch.bincount(labels, minlength=len(kept["mix"])).clamp(min=1)
    weight = (kept["mix"] / there)[labels].double()
    alone, mixed = probabilities(kept, "others")
    right = (mixed.argmax(3) == labels).double() - (alone.argmax(1) == labels).double()
    # A client whose labels nobody else has in its validation samples cannot be judged.
    return 100 * (right @ weight) / weight.sum().clamp(min=1e-9)


def gate(training: float, caution: float = CAUTION, trusting: bool = False) -> Callable[..., float]:
    def gained(case: Case) -> float:
        expected = case.trusting if trusting else case.expected
        proof = case.validation + PRIOR_SAMPLES * expected + training * case.training
        share, sharpness = (float(value) for value in choice(proof, caution))
        if share == 0:
            return 0.0
        beta = min(range(len(SHARPNESS)), key=lambda b: abs(SHARPNESS[b] - sharpness))
        return float(case.gain[beta, SHARES.index(share)])

    return gained


GATES = {
    "trusting": gate(0, trusting=True),
    "by validation": gate(0),
    "cautious": gate(0, caution=2 * CAUTION),
    "training 20": gate(20),
    "training 40": gate(40),
    "training 80": gate(80),
}


def cases(kept: list[dict[str, Tensor]]) -> list[Case]:
    decisions, numbers, told, kind = (
        torch.stack([one[name] for one in kept])
        for name in ("soft_decisions", "samples", "gains", "kind")
    )
    said = Witnesses.hear(decisions, bounded(numbers))
    expected = prior(told, kind, kinship(said, kind)).double()
    trusting = prior(told, kind, torch.ones(len(kind))).double()
    return [Case(*known) for known in zip(kept, expected, trusting, strict=True)]


def main(part: str = "1/1") -> None:
    torch.set_num_threads(1)
    shard = Shard.parse(part)
    wanted = [(f, setting, seed) for seed in SEEDS for f in FAMILIES for setting in SETTINGS]
    for run in wanted[shard.number - 1 :: shard.of]:
        if not path_of(*run).is_file():
            collect(*run, path_of(*run))
    if any(not path_of(*run).is_file() for run in wanted):
        return
    rows: list[dict[str, Any]] = []
    for family in FAMILIES:
        for setting in SETTINGS:
            runs = [cases(torch.load(path_of(family, setting, seed))) for seed in SEEDS]
            for name, gained in GATES.items():
                clients = [[[round(gained(one), 2), one.group] for one in run] for run in runs]
                rows.append(
                    {"family": family, "setting": setting, "gate": name, "clients": clients}
                )
    record = {"rows": rows, "seeds": [*SEEDS], "environment": environment(torch.device("cpu"))}
    path = RESULTS / "kin_gate.json"
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n", "utf-8")


def path_of(family: str, setting: str, seed: int) -> Path:
    return FOLDER / f"{folder_name(f'{family}-{setting}-{seed}')}.pt"


if __name__ == "__main__":
    main(*sys.argv[1:])
