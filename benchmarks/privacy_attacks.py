"""What a server learns of its clients from what they send, with and without privacy.

    python benchmarks/privacy_attacks.py                           as committed
    python benchmarks/privacy_attacks.py --workers 15 --shadows 256   on a larger machine
    python benchmarks/privacy_attacks.py --link tiny --link "8 bits" …  other lines stay as they are
    python benchmarks/privacy_attacks.py --method perfed-kin …          as they do here

A run takes about half a second of one core; there are shadows × methods × links of them. Each is
written below build/privacy_attacks when it ends, so that a second start goes on; delete the folder
after a change of settings.

The server is curious and knows much: it chose the public set, and put the samples into it that it
asks about; it knows all settings, and can play whole federations itself ("shadows") with samples
like those of its clients. What it sees is what really crosses: the messages of one client, all
rounds. Four questions:

- *membership*: was this sample trained on? LiRA (Carlini et al. 2022): the logit of what the client
  says of the sample, against normal laws fitted to shadows with and without it. Every run is once
  the one under attack, with all others as shadows. AUC, and the share of members found where one of
  1,000 non-members is called a member.
- *label mix*: half the sum of absolute differences between the estimated and the true shares of
  classes. To compare: always guessing the mix of all clients.
- *counts*: the error of the number of training samples, relative.
- *inversion*: of a linear map fitted to the answers on public samples, the row of a class, as a
  picture: its correlation with the mean picture of that class at the client, over classes it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from committed import RESULTS, ROOT, result

from perfed.config import LINKS as PRESET_LINKS
from perfed.config import read_mapping

CLIENTS, POOL, PUBLIC = 6, 100, 200
ROUNDS, STEPS, BATCH = 8, 10, 16
CLASSES = 10
CLIP = 3.0  # as in privacy.py
METHODS = ("perfed-ckt", "perfed-kin", "fedmd", "fedproto", "fedavg")
OF_PROBABILITIES = ("perfed-ckt", "perfed-kin")
NUMBERS = {"name": "number-bits", "bits": 8}
LINKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ε ≤ 8": {"privacy": {"noise": 2.04, "clip": CLIP, "delta": 1e-5, "epsilon": 8.0}},
    "ε ≤ 2": {"privacy": {"noise": 6.48, "clip": CLIP, "delta": 1e-5, "epsilon": 2.0}},
    "8 bits": {"wire": [NUMBERS, "deflate"]},
    "hard labels": {"wire": [{"name": "probability-bits", "bits": 1}, NUMBERS]},
    "tiny": {"wire": read_mapping("tiny", PRESET_LINKS)["wire"]},
}
"""What is between a method and the network. The noise is what lets a client of 50 samples take part
to the end (``noise_for`` in core/privacy.py)."""
HELD = ROOT / "build" / "privacy_attacks"
FALSE_ALARMS = 1e-3


def settings(method: str, link: str) -> dict[str, Any]:
    algorithm: Any = {"name": "perfed-ckt", "clusters": 2} if method == "perfed-ckt" else method
    return {
        "name": "attacked",
        "rounds": ROUNDS,
        "clients": CLIENTS,
        "clients_per_round": CLIENTS,
        "data": {"name": "digits", "public": PUBLIC},
        "partition": {"name": "dirichlet", "alpha": 0.5},
        "models": {"architectures": [{"name": "mlp", "hidden": [64]}]},
        "training": {
            "learning_rate": 0.2,
            "steps": STEPS,
            "batch_size": BATCH,
            "public_batch_size": 32,
        },
        "algorithm": algorithm,
        **LINKS[link],
    }


def pools(federation: Any) -> list[np.ndarray]:
    """The samples that may be each client's: the same in all runs."""
    held = [
        np.concatenate([split.train, split.validation, split.test, split.unused])
        for split in federation.splits
    ]
    return [np.sort(one)[:POOL] for one in held]


def attacked(method: str, link: str, seed: int) -> None:
    """One federation whose clients train on half of what may be theirs; what the server makes of
    their messages goes to a file."""
    path = HELD / f"{method}-{list(LINKS).index(link)}-{seed}.npz"
    if path.is_file():
        return
    import torch

    from perfed import Execution, Experiment
    from perfed.core.channel import Channel
    from perfed.core.schema import from_mapping
    from perfed.data.federation import ClientSplit
    from perfed.runs.simulation import Simulation

    torch.set_num_threads(1)
    base = from_mapping(Experiment, settings(method, link))
    federation = base.federation()
    candidates = pools(federation)
    draw = np.random.default_rng(seed)
    member = [draw.permutation(len(pool)) < len(pool) // 2 for pool in candidates]
    splits = []
    for pool, inside, split in zip(candidates, member, federation.splits, strict=True):
        rest = np.setdiff1d(np.concatenate([split.validation, split.test, split.unused]), pool)
        test = rest if len(rest) >= 20 else split.test
        splits.append(ClientSplit(pool[inside], test[:10], test[10:], test[:0]))
    # The server's choice: what it asks about is in the public set.
    asked = federation.samples.x[np.concatenate(candidates)]
    public = np.concatenate([federation.samples.public_x, asked])
    samples = dataclasses.replace(
        federation.samples, public_x=public, public_index=np.arange(len(public))
    )
    changed = dataclasses.replace(federation, samples=samples, splits=splits)
    with mock.patch.object(Experiment, "federation", return_value=changed):
        simulation = Simulation(base, how=Execution(device="cpu"))
    # It knows the seed of the run, and with it initial weights and mini-batches; not a site's own.
    simulation.population.secret = seed
    heard: list[dict[int, Any]] = []
    decoded = simulation._admitted

    def listening(round: int, *sent: Any) -> Any:
        replies = decoded(round, *sent)
        if round >= 0:
            heard.append(replies)
        return replies

    simulation._admitted = listening  # type: ignore[method-assign]
    channel = Channel()
    simulation.begin(channel)
    for round in range(ROUNDS):
        simulation.play_round(round, channel)
    columns = simulation.population.evaluate(simulation.evaluation_messages(ROUNDS - 1), ROUNDS - 1)
    column = columns.get("personal") or columns["global"]
    HELD.mkdir(parents=True, exist_ok=True)
    found = seen(simulation, heard, candidates, member)
    found["accuracy"] = column["test_accuracy"]
    temporary = path.with_suffix(".part.npz")
    np.savez_compressed(temporary, **found)
    temporary.rename(path)


def seen(
    simulation: Any, heard: list[dict[int, Any]], candidates: list[np.ndarray], member: list[Any]
) -> dict[str, np.ndarray]:
    """What the server computes from the messages, by client."""
    labels = simulation.federation.samples.y
    public = simulation.federation.samples.public_x.reshape(-1, 64)[:PUBLIC]
    starts = np.cumsum([PUBLIC] + [len(pool) for pool in candidates])
    score: list[np.ndarray] = []  # (pool, numbers) of each client
    mixes, told, pictures = [], [], []
    true_mixes, true_counts = [], []
    for client, pool in enumerate(candidates):
        y = labels[pool]
        rounds = []
        for replies in heard:
            answers = answers_in(simulation, client, replies[client])
            if answers is not None:
                rows = answers[starts[client] : starts[client] + len(pool)]
                chance = np.clip(rows[np.arange(len(pool)), y], 1e-6, 1 - 1e-6)
                rounds.append(np.log(chance) - np.log1p(-chance))
        last = heard[-1][client]
        answers = answers_in(simulation, client, last)
        if rounds:
            score.append(np.mean(rounds, 0)[:, None])
            mixes.append(answers[:PUBLIC].mean(0))
        else:  # class means: that of the sample's class
            score.append(last["prototypes"].numpy()[y].astype(float))
            counts = last["counts"].numpy().astype(float)
            mixes.append(counts / counts.sum())
        trained = y[member[client]]
        true_mixes.append(np.bincount(trained, minlength=CLASSES) / len(trained))
        true_counts.append(len(trained))
        told.append(told_in(simulation, client, last))
        own = simulation.federation.samples.x[pool[member[client]]].reshape(-1, 64)
        pictures.append(likeness(public, answers, own, trained))
    return {
        "score": np.concatenate(score),
        "member": np.concatenate(member),
        "mix": np.array(mixes),
        "true_mix": np.array(true_mixes),
        "told": np.array(told, dtype=float),
        "count": np.array(true_counts),
        "likeness": np.array(pictures, dtype=float),
    }


def answers_in(simulation: Any, client: int, message: Any) -> np.ndarray | None:
    """Probabilities on the public set, as a message gives them away; None where it has none."""
    import torch

    if "soft_decisions" in message:
        return message["soft_decisions"].numpy().astype(float)
    if "logits" in message:
        return message["logits"].softmax(1).numpy().astype(float)
    if "model" not in message:
        return None
    population = simulation.population
    module = population.modules[population.architectures[client]].eval()
    with torch.no_grad():
        logits = torch.func.functional_call(
            module, message["model"].params | message["model"].buffers, (population.public_x,)
        )
    return logits.softmax(1).numpy().astype(float)


def told_in(simulation: Any, client: int, message: Any) -> float:
    if "samples" in message:
        return float(message["samples"])
    if "counts" in message:
        return float(message["counts"].sum())
    return float(simulation.info(client).samples)  # on joining


def likeness(
    public: np.ndarray, answers: np.ndarray | None, own: np.ndarray, labels: np.ndarray
) -> float:
    if answers is None:
        return float("nan")
    logs = np.log(np.clip(answers[:PUBLIC], 1e-6, 1))
    logs = logs - logs.mean(1, keepdims=True)
    x = public - public.mean(0)
    ridge = x.T @ x + 10.0 * np.eye(x.shape[1])
    rows = np.linalg.solve(ridge, x.T @ (logs - logs.mean(0)))
    found = []
    for label in np.unique(labels):
        picture = own[labels == label].mean(0) - public.mean(0)
        if picture.std() and rows[:, label].std():
            found.append(np.corrcoef(picture, rows[:, label])[0, 1])
    return float(np.mean(found))


def lira(score: np.ndarray, member: np.ndarray) -> dict[str, float]:
    """Of scores (runs, samples, numbers): each run is attacked once, by laws fitted to the others.
    Several numbers become one along the line from the mean without a sample to the mean with it."""
    ratios = []
    for target in range(len(score)):
        others = np.arange(len(score)) != target
        inside = member[others]
        weights = [m / np.maximum(m.sum(0), 1) for m in (inside, ~inside)]
        means = [np.einsum("rs,rsn->sn", weight, score[others]) for weight in weights]
        line = means[0] - means[1] if score.shape[-1] > 1 else np.ones_like(means[0])
        said = (score * line).sum(-1)
        logs = []
        for weight, mean in zip(weights, means, strict=True):
            middle = (mean * line).sum(-1)
            # One spread for all samples: few shadows tell little of each.
            variance = (weight * (said[others] - middle) ** 2).sum(0).mean()
            logs.append(-((said[target] - middle) ** 2) / (2 * variance) - np.log(variance) / 2)
        ratios.append(logs[0] - logs[1])
    ratio, truth = np.concatenate(ratios), member.reshape(-1)
    return {"auc": area(ratio, truth), "found": found_at(ratio, truth, FALSE_ALARMS)}


def area(ratio: np.ndarray, truth: np.ndarray) -> float:
    """Under the curve of true by false positives; equals count as half."""
    order = np.unique(ratio, return_inverse=True)[1]
    total = np.bincount(order)
    ranks = (np.cumsum(total) - (total - 1) / 2)[order]
    inside = truth.sum()
    outside = len(truth) - inside
    return float((ranks[truth].sum() - inside * (inside + 1) / 2) / (inside * outside))


def found_at(ratio: np.ndarray, truth: np.ndarray, alarms: float) -> float:
    """The share of members above the value that so few non-members pass."""
    outside = np.sort(ratio[~truth])[::-1]
    bound = outside[int(alarms * len(outside))]
    return float((ratio[truth] > bound).mean())


def attack(method: str, link: str, shadows: int) -> dict[str, Any]:
    number = list(LINKS).index(link)
    runs = [np.load(HELD / f"{method}-{number}-{seed}.npz") for seed in range(shadows)]
    score, member = (np.stack([run[name] for run in runs]) for name in ("score", "member"))
    mixes, true = (np.stack([run[name] for run in runs]) for name in ("mix", "true_mix"))
    guessed = true.mean((0, 1))
    told, count = (np.stack([run[name] for run in runs]) for name in ("told", "count"))
    return {
        "method": method,
        "link": link,
        "accuracy": float(np.mean([run["accuracy"].mean() for run in runs])),
        **lira(score, member),
        "label_mix": float(np.abs(mixes - true).sum(-1).mean() / 2),
        "label_mix_guessed": float(np.abs(guessed - true).sum(-1).mean() / 2),
        "count_error": float((np.abs(told - count) / count).mean()),
        "likeness": _number(np.mean([run["likeness"].mean() for run in runs])),
    }


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def covered(method: str, link: str) -> bool:
    import perfed

    if "privacy" in LINKS[link]:
        return not perfed.algorithms[method].not_private
    # Methods that send probabilities have codecs of their own.
    return link == "plain" or (link == "8 bits") != (method in OF_PROBABILITIES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--shadows", type=int, default=32)
    parser.add_argument("--link", action="append", choices=LINKS, help="default: all")
    parser.add_argument("--method", action="append", choices=METHODS, help="default: all")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    from perfed.runs.directory import environment

    pairs = [(m, link) for m in METHODS for link in LINKS if covered(m, link)]
    methods, links = given.method or METHODS, given.link or LINKS
    wanted = [(m, link) for m, link in pairs if m in methods and link in links]
    jobs = [(m, link, seed) for seed in range(given.shadows) for m, link in wanted]
    with ProcessPoolExecutor(given.workers) as pool:
        for number, _ in enumerate(pool.map(attacked, *zip(*jobs, strict=True)), 1):
            if number % len(wanted) == 0:
                print(f"{number} of {len(jobs)} federations", flush=True)
    here = {"shadows": given.shadows, "environment": environment(torch.device("cpu"))}
    rows = {pair: attack(*pair, given.shadows) | here for pair in wanted}
    if len(wanted) < len(pairs):
        rows |= {
            pair: row
            for row in result("privacy_attacks")["rows"]
            if (pair := (row["method"], row["link"])) in pairs and pair not in rows
        }
    record = {
        "clients": CLIENTS,
        "pool": POOL,
        "settings": settings("perfed-kin", "plain"),
        "links": LINKS,
        "rows": [rows[pair] for pair in pairs if pair in rows],
    }
    path: Path = RESULTS / "privacy_attacks.json"
    path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
