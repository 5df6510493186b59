"""Which prior should PerFed-Kin's gate have? Judged by validation samples of tuning seeds alone.

    python benchmarks/kin_gate.py         runs what is missing, then judges; some ten minutes

What clients learn does not depend on the gate. So each setting is run once, and what a gate decides
by is kept: what clients said last, and what both models make of every validation sample. A gate is
asked once for every validation sample, of which it does not know; that sample judges it. So a gate
has one sample less here than in a run. Kinds must gain by two standard errors, as they had to when
the gate was chosen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from committed import ROOT
from kin import RESULTS, experiment
from torch import Tensor
from torch.nn.functional import softmax

from perfed import Execution
from perfed.algorithms.perfed_evidence import (
    FLOOR,
    PRIOR_SAMPLES,
    SHARES,
    SHARPNESS,
    choice,
    label_mix,
)
from perfed.algorithms.perfed_kin import PerFedKin, bounded, kinship
from perfed.algorithms.witnesses import Witnesses
from perfed.core.algorithm import Adjusted, Client, algorithms
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.runs.directory import environment
from perfed.runs.simulation import Simulation
from perfed.runs.study import folder_name

SEEDS = {
    "one with other labels": range(1000, 1012),
    "labels permuted, Dir(0.3)": range(1000, 1012),
    "10 % with other labels": range(1000, 1004),
    "20 % with other labels": range(1000, 1004),
    "labels permuted": range(1000, 1004),
    "rotated, public set too": range(1000, 1004),
    "rotated": range(1000, 1004),
    "contrast": range(1000, 1004),
    "IID": range(1000, 1004),
    "Dir(0.5)": range(1000, 1004),
    "Dir(0.1)": range(1000, 1004),
    "Dir(0.01)": range(1000, 1004),
    "latent groups": range(1000, 1004),
}
FOLDER = ROOT / "runs" / "kin-gate"
STUDENT = (SHARPNESS.index(1.0), SHARES.index(1.0))
CAUTION = PerFedKin().caution
SEEN: dict[int, dict[str, np.ndarray]] = {}


@algorithms.register("kin-observed")
@dataclass(frozen=True)
class Observed(PerFedKin):
    """Writes down what both models make of each validation sample."""

    def client_round(self, client: Client, message: Message) -> Message:
        answer = super().client_round(client, message)
        if client.state:
            SEEN[client.id] = observed(client)  # type: ignore[attr-defined]
        return answer


def observed(client: Client) -> dict[str, np.ndarray]:
    log_mix, student = label_mix(client.label_counts()).log(), client.state["student"]
    alone = client.likelihoods(client.weights, "validation")
    own = softmax(client.logits(client.weights, on="validation"), 1)
    logits = client.logits(student, on="validation")
    taught, right = [], [_is_right(own, alone)]
    for beta in SHARPNESS:
        likelihood = client.likelihoods(
            Adjusted(student, log_mix.new_tensor(beta), log_mix), "validation"
        )
        told = softmax(beta * logits + log_mix, 1)
        taught.append(likelihood)
        right += [
            _is_right((1 - w) * own + w * told, (1 - w) * alone + w * likelihood) for w in SHARES
        ]
    tensors = {"alone": alone, "taught": torch.stack(taught), "right": torch.stack(right)}
    return {name: values.numpy() for name, values in tensors.items()}


def _is_right(probabilities: Tensor, of_label: Tensor) -> Tensor:
    return probabilities.max(1).values <= of_label * (1 + 1e-5)


def collect(setting: str, seed: int, path: Path) -> None:
    SEEN.clear()
    what = experiment("digits", setting, {"name": "kin-observed", "standard_errors": 2.0}, seed)
    simulation, channel = Simulation(what, how=Execution(engine="stacked")), Channel()
    simulation.begin(channel)
    for number in range(what.rounds):
        simulation.play_round(number, channel)
    state = simulation.progress.state
    names = [name for name in state["bank"] if int(name) in SEEN]
    groups = what.shift.deal(what.clients, seed) if what.shift else np.zeros(what.clients, int)
    seen = [SEEN[int(name)] for name in names]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        decisions=np.stack([np.asarray(state["bank"][n]["soft_decisions"]) for n in names]),
        samples=np.array([float(state["bank"][n]["samples"]) for n in names]),
        kind=np.array([int(state["kind"][n]) for n in names]),
        group=np.array([groups[int(n)] for n in names]),
        n=np.array([len(one["alone"]) for one in seen]),
        **{
            name: np.concatenate([one[name] for one in seen], axis=-1)
            for name in ("alone", "taught", "right")
        },
    )


@dataclass(frozen=True)
class Case:
    """What is known of a client when one of its validation samples is left out."""

    own: Tensor
    """Gains of the other samples, (β, w, sample)."""
    others: Tensor
    """Mean gains of the others of its group, (client, β, w)."""
    kin: float
    fits: float
    """Its fit as a share of the group's mean, as the gate before had it."""


Prior = Callable[[Case], Tensor]


def before(case: Case) -> Tensor:
    return case.others.mean(0) * min(max(4 * case.fits - 1, 0), 1)


def trusting(case: Case) -> Tensor:
    return case.others.mean(0)


def for_kin(case: Case) -> Tensor:
    return case.kin * case.others.mean(0)


def against_strangers(case: Case) -> Tensor:
    mean = case.others.mean(0)
    return case.kin * mean - (1 - case.kin) * mean.abs()


def doubted(case: Case) -> Tensor:
    """Kinship is also asked of the client's own samples: to kin the student brings what it brings
    to the others, to a stranger as much less than nothing, with the variance over the others."""
    mean = case.others.mean(0)
    usual = mean[STUDENT].clamp(min=0)
    variance = (usual**2 + ((case.others[:, *STUDENT] - usual) ** 2).sum()) / len(case.others)
    own = case.own[STUDENT].mean() if case.own.shape[2] else torch.tensor(0.0)
    odds = torch.tensor(case.kin).double().logit() + 2 * usual * own / variance.clamp(min=1e-9)
    kin = odds.sigmoid()
    return kin * mean - (1 - kin) * mean.abs()


PRIORS: dict[str, Prior] = {
    "before": before,
    "trusting": trusting,
    "for kin": for_kin,
    "against strangers": against_strangers,
    "doubted": doubted,
}


def judge(stored: dict[str, np.ndarray]) -> dict[str, list[list[float]]]:
    """Of every client the mean gain in accuracy by each prior, over samples left out, and its
    group."""
    said = Witnesses.hear(
        torch.tensor(stored["decisions"]), bounded(torch.tensor(stored["samples"]))
    )
    kind = torch.tensor(stored["kind"])
    kin, fits = kinship(said, kind), shares_of_fit(said, kind)
    gains, right = per_client(stored)
    means = torch.stack([gain.mean(2) for gain in gains])
    result: dict[str, list[list[float]]] = {name: [] for name in PRIORS}
    for k in range(len(gains)):
        others = (kind == kind[k]) & (torch.arange(len(kind)) != k)
        for name, prior in PRIORS.items():
            found = []
            for out in range(gains[k].shape[2]):
                own = torch.cat([gains[k][..., :out], gains[k][..., out + 1 :]], 2)
                case = Case(own, means[others], float(kin[k]), float(fits[k]))
                proof = own.sum(2) + (PRIOR_SAMPLES * prior(case) if others.any() else 0)
                found.append(right[k][_row(proof), out] - right[k][0, out])
            result[name].append([round(100 * float(np.mean(found)), 2), int(stored["group"][k])])
    return result


def _row(proof: Tensor) -> int:
    """Where the choice stands among those whose answers were kept; 0: the witness alone."""
    share, sharpness = choice(proof, CAUTION)
    if float(share) == 0:
        return 0
    beta, w = SHARPNESS.index(round(float(sharpness), 3)), SHARES.index(round(float(share), 3))
    return 1 + beta * len(SHARES) + w


def per_client(stored: dict[str, np.ndarray]) -> tuple[list[Tensor], list[np.ndarray]]:
    shares = np.array(SHARES)[:, None]
    mixed = (1 - shares) * stored["alone"] + shares * stored["taught"][:, None].astype(float)
    gains = torch.tensor(np.log(mixed + FLOOR) - np.log(stored["alone"] + FLOOR))
    ends = np.cumsum(stored["n"])[:-1]
    rights = np.split(stored["right"].astype(float), ends, axis=1)
    return list(gains.tensor_split(torch.tensor(ends), dim=2)), rights


def shares_of_fit(said: Witnesses, kind: Tensor) -> Tensor:
    """What the gate before asked: the fit, shrunk by one sample, by the group's mean fit."""
    result = torch.ones(len(said), dtype=torch.double)
    for group in range(int(kind.max()) + 1):
        members = kind == group
        voice, fit = said.voice[members], said.fit(members)[members]
        usual = ((voice * fit).sum() / voice.sum().clamp(min=1e-9)).clamp(min=0.05)
        result[members] = (voice * fit + usual) / (voice + 1) / usual
    return result


def main() -> None:
    rows: list[dict[str, Any]] = []
    for setting, seeds in SEEDS.items():
        clients: dict[str, list[Any]] = {name: [] for name in PRIORS}
        for seed in seeds:
            path = FOLDER / f"{folder_name(f'{setting}-{seed}')}.npz"
            if not path.is_file():
                collect(setting, seed, path)
            with np.load(path) as stored:
                for name, found in judge(dict(stored)).items():
                    clients[name].append(found)
        rows += [{"setting": setting, "prior": p, "clients": of} for p, of in clients.items()]
    seeds = {setting: list(seeds) for setting, seeds in SEEDS.items()}
    record = {"rows": rows, "seeds": seeds, "environment": environment(torch.device("cpu"))}
    path = RESULTS / "kin_gate.json"
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main()
