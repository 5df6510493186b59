"""The works of the comparison, as perfed's experiments, and the folder that every worker reads.

Arrays are made up: each class has a picture, a sample is its class's picture under noise. Pictures
are bytes in perfed's file, as they are in most; the others get what perfed's networks get of them,
the same numbers from −1 to 1 in float32. A client
has as many training samples as one epoch needs, so that peers that count epochs and peers that
count steps do the same. They are those that perfed's split gives it; the networks start from the
weights that perfed draws.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from perfed.config import Experiment
from perfed.core.schema import from_mapping
from perfed.data import Federation
from perfed.engines import Execution
from perfed.runs.simulation import Simulation

HTFE8 = "htfe8"  # of perfed
NETWORKS = Path(__file__).with_name("networks.py")
CLASSES = 10
MAPPED = "mapped"  # a folder beside the others' files


@dataclass(frozen=True)
class Workload:
    about: str
    algorithm: dict[str, Any]
    network: str
    shape: tuple[int, ...]
    clients: int = 10
    clients_per_round: int = 10
    steps: int = 50
    batch_size: int = 32
    learning_rate: float = 0.01

    def experiment(self, data: Path) -> dict[str, Any]:
        return {
            "name": "peers",
            "rounds": 1000,
            "clients": self.clients,
            "clients_per_round": self.clients_per_round,
            "selection": "uniform",
            "data": {"name": "npz", "path": str(data)},
            "partition": "iid",
            "split": {"train": [0.8], "validation": 0.1, "test": 0.1},
            "models": self.network if self.network == HTFE8 else [f"{NETWORKS}:{self.network}"],
            "training": {
                "learning_rate": self.learning_rate,
                "steps": self.steps,
                "batch_size": self.batch_size,
            },
            "algorithm": self.algorithm,
        }


FEDAVG, DITTO, LOCAL = {"name": "fedavg"}, {"name": "ditto", "weight": 1.0}, {"name": "local"}
CNN = "CNN of 582,026 parameters, 10 clients × 50 steps × batch 32"
VGG = "VGG11 with BatchNorm, 10 clients × 50 steps × batch 64"
WORKLOADS = {
    "vgg": Workload(f"FedAvg, {VGG}", FEDAVG, "vgg11", (3, 32, 32), batch_size=64),
    "vgg-ditto": Workload(f"Ditto, {VGG}", DITTO, "vgg11", (3, 32, 32), batch_size=64),
    "fedavg": Workload(f"FedAvg, {CNN}", FEDAVG, "Cnn", (1, 28, 28)),
    "ditto": Workload(f"Ditto, {CNN}", DITTO, "Cnn", (1, 28, 28)),
    "hypcluster": Workload(
        f"HypCluster with three models, {CNN}",
        {"name": "hypcluster", "clusters": 3},
        "Cnn",
        (1, 28, 28),
    ),
    "cifar": Workload(
        "pfl-research's CIFAR-10 benchmark: FedAvg, CNN with dropout, 50 of 1,000 clients × "
        "5 steps × batch 10",
        FEDAVG,
        "DropoutCnn",
        (3, 32, 32),
        clients=1000,
        clients_per_round=50,
        steps=5,
        batch_size=10,
        learning_rate=0.1,
    ),
    "htfe8": Workload(
        "HtFLlib's eight networks (HtFE8), local training, 20 clients × 25 steps × batch 10",
        LOCAL,
        HTFE8,
        (3, 32, 32),
        clients=20,
        clients_per_round=20,
        steps=25,
        batch_size=10,
    ),
    "htfe8-small": Workload(
        "HtFLlib's eight networks (HtFE8), local training, 8 clients × 1 step × batch 10",
        LOCAL,
        HTFE8,
        (3, 32, 32),
        clients=8,
        clients_per_round=8,
        steps=1,
        batch_size=10,
    ),
    "mlp": Workload(
        "FedAvg, MLP of 4,810 parameters, 10 of 30 clients × 10 steps × batch 32",
        FEDAVG,
        "Mlp",
        (64,),
        clients=30,
        steps=10,
        learning_rate=0.1,
    ),
}


def prepare(workload: Workload, folder: Path, device: str, threads: int) -> list[nn.Module]:
    """Write what every worker reads; returns each client's network."""
    data = folder / "data.npz"
    x, y = samples(workload)
    np.savez(data, x=x, y=y)
    experiment = workload.experiment(data)
    simulation = Simulation(
        from_mapping(Experiment, experiment), how=Execution(engine="sequential", device="cpu")
    )
    federation = simulation.federation
    for part in ("train", "test"):
        held = [getattr(split, part) for split in federation.splits]
        where = np.concatenate(held)
        np.savez(
            folder / f"{part}.npz",
            x=federation.samples.numbers(federation.samples.x[where]),
            y=federation.samples.y[where],
            ends=np.cumsum([len(one) for one in held]),
        )
    write_mapped(federation, folder / MAPPED)
    clusters = workload.algorithm.get("clusters", 1)
    population = simulation.population
    for network, label in enumerate(population.by_label):
        for number in range(clusters):
            weights = population.initial_weights(label, number)
            tensors = weights.params | weights.buffers
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            np.savez(folder / f"initial_{network}_{number}.npz", **arrays)
    said = {
        "algorithm": workload.algorithm["name"],
        "network": workload.network,
        "clients": workload.clients,
        "clients_per_round": workload.clients_per_round,
        "steps": workload.steps,
        "batch_size": workload.batch_size,
        "learning_rate": workload.learning_rate,
        "classes": CLASSES,
        "device": device,
        "threads": threads,
        "weight": workload.algorithm.get("weight", 0.0),
        "clusters": clusters,
        "experiment": experiment,
    }
    (folder / "work.json").write_text(json.dumps(said))
    return [population.modules[label] for label in population.architectures]


def write_mapped(federation: Federation, folder: Path) -> None:
    """The same samples on disk, client by client, as ``data: mapped`` reads them."""
    parts = ("train", "validation", "test")
    held = [np.concatenate([getattr(one, part) for part in parts]) for one in federation.splits]
    where = np.concatenate(held)
    folder.mkdir()
    np.save(folder / "x.npy", federation.samples.x[where])
    np.save(folder / "y.npy", federation.samples.y[where])
    np.save(folder / "sizes.npy", np.array([len(one) for one in held]))


def samples(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    each = round(workload.steps * workload.batch_size / 0.8)
    y = random.integers(0, CLASSES, workload.clients * each)
    pictures = random.normal(size=(CLASSES, *workload.shape)).astype(np.float32)
    x = random.standard_normal((len(y), *workload.shape), np.float32)
    x += 0.5 * pictures[y]
    return (as_bytes(x) if len(workload.shape) == 3 else x), y


def as_bytes(x: np.ndarray) -> np.ndarray:
    """Few of the numbers are cut off."""
    return np.clip(np.rint(x * 48 + 127.5), 0, 255).astype(np.uint8)
