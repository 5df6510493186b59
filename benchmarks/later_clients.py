"""Clients that come when a federation is over: what the server knows, against local training.

A quarter of the clients takes no part in the federation. Afterwards each gets what the server would
send to a client that it has never heard of, and trains with it for some rounds; nothing comes back,
and the server stays as it is. The same clients train alone, with as many steps on the same
mini-batches. Test accuracy of the last round; nothing is chosen by it.

    python benchmarks/later_clients.py          # some minutes on one core

The command of a real federation is ``perfed site learn``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from committed import RESULTS

from perfed import Execution, Experiment
from perfed.core.channel import Channel
from perfed.core.schema import from_mapping
from perfed.core.selection import select_clients
from perfed.runs.directory import environment
from perfed.runs.result import headline
from perfed.runs.simulation import Simulation

SEEDS = range(5)
LATER_ROUNDS = 20
EVERY = 4  # of so many clients, the last comes later
BASE: dict[str, Any] = {
    "rounds": 30,
    "clients": 24,
    "clients_per_round": 8,
    "data": {"name": "digits", "public": 400},
    "models": {"architectures": [{"name": "mlp", "hidden": [64]}]},
    "training": {"learning_rate": 0.1, "steps": 10, "batch_size": 32, "public_batch_size": 64},
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "3 groups": {"name": "groups", "groups": 3},
    "Dir(0.1)": {"name": "dirichlet", "alpha": 0.1, "minimum": 20},
}
METHODS: dict[str, dict[str, Any]] = {
    "local": {"name": "local"},
    "perfed-ckt": {"name": "perfed-ckt", "clusters": 3, "weight": 1.0},
    "perfed-kin": {"name": "perfed-kin"},
    "fedavg": {"name": "fedavg"},
    "fedavg-ft": {"name": "fedavg-ft"},
}


class Early(Simulation):
    """A federation in which some clients are never selected."""

    @property
    def later(self) -> list[int]:
        return [client for client in range(self.clients) if client % EVERY == EVERY - 1]

    def select(self, round: int) -> list[int]:
        early = [client for client in range(self.clients) if client not in self.later]
        sizes = self.federation.train_sizes[early]
        by_size = self.experiment.selection == "by-size"
        chosen = select_clients(sizes, self.selected, by_size, self.experiment.seed, round)
        return [early[place] for place in chosen]


def measured(method: str, partition: str, seed: int) -> list[float]:
    """The test accuracy of each later client."""
    values = BASE | {"partition": PARTITIONS[partition], "seed": seed, "name": "later"}
    experiment = from_mapping(Experiment, values | {"algorithm": METHODS[method]})
    run = Early(experiment, how=Execution(engine="stacked", device="cpu"))
    channel, alone = Channel(), method == "local"
    run.begin(channel)
    for round in range(0 if alone else experiment.rounds):
        run.play_round(round, channel)
    for round in range(LATER_ROUNDS):
        messages = run._broadcast(round, run.later, channel)
        run.engine.perform([run.population.call("client_round", messages, round)])
        run.engine.commit(run.population)
    last = LATER_ROUNDS - 1
    columns = run.population.evaluate(run.evaluation_messages(last, run.later), last)
    run.engine.close()
    accuracies: list[float] = headline(columns)["test_accuracy"].tolist()
    return accuracies


def main() -> None:
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[list[float]]]] = {}
    for partition in PARTITIONS:
        for method in METHODS:
            by_seed = [measured(method, partition, seed) for seed in SEEDS]
            found.setdefault(partition, {})[method] = by_seed
            print(
                f"{partition}, {method}: {100 * np.mean([*map(np.mean, by_seed)]):.1f}", flush=True
            )
    record = {
        "settings": BASE | {"partitions": PARTITIONS, "methods": METHODS},
        "seeds": [*SEEDS],
        "later_rounds": LATER_ROUNDS,
        "accuracies": found,
        "environment": environment(torch.device("cpu")),
    }
    (RESULTS / "later_clients.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
