"""How far apart two runs of one experiment are if only their rounding differs (docs/rounding.md).

python benchmarks/chaos.py    writes benchmarks/results/chaos.json, in a few minutes

Each network trains three times: on the engine ``sequential``, on ``stacked``, and on ``sequential``
with a learning rate that differs in its eighth digit. Distances are of all clients' parameters.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from committed import RESULTS

import perfed
from perfed.runs.directory import environment

ROUNDS = (1, 5, 10, 20, 40)
FEW = (1, 5)  # of what is slow, and apart after the first round already
RATE, NUDGED = 0.1, 0.10000001
NETWORKS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "MLP, 1 hidden layer": ({"name": "mlp", "hidden": [64]}, ROUNDS),
    "MLP, 8 hidden layers": ({"name": "mlp", "hidden": [64] * 8}, ROUNDS),
    "CNN with BatchNorm": ({"name": "cnn", "batchnorm": True}, ROUNDS),
    "ResNet-8": ({"name": "resnet8", "features": 64}, FEW),
}


def experiment(network: Any, rounds: int, rate: float) -> perfed.Experiment:
    return perfed.Experiment(
        rounds=rounds,
        clients=6,
        clients_per_round=6,
        evaluate_every=rounds,
        data={"name": "digits", "public": 200},
        partition={"name": "groups", "groups": 3},
        models={"architectures": [network]},
        training={"learning_rate": rate},
        algorithm={"name": "perfed-ckt", "clusters": 3, "weight": 1.0},
    )


def trained(network: Any, rounds: int, rate: float, engine: str) -> perfed.Result:
    how = perfed.Execution(engine=engine, device="cpu")  # type: ignore[arg-type]
    folder = tempfile.mkdtemp()
    return perfed.run(experiment(network, rounds, rate), Path(folder) / "run", how=how)


def parameters(result: perfed.Result) -> torch.Tensor:
    clients = range(result.experiment.clients)
    return torch.cat([p.flatten() for c in clients for p in result.model(c).parameters()]).detach()


def accuracies(result: perfed.Result) -> torch.Tensor:
    frame = result.per_client()
    last = frame[frame["round"] == frame["round"].max()].sort_values("client")
    return torch.tensor(last["test_accuracy"].to_numpy())


def apart(one: perfed.Result, other: perfed.Result) -> dict[str, float]:
    a, b = parameters(one).double(), parameters(other).double()
    difference = 100 * (accuracies(one) - accuracies(other))
    return {
        "distance": float((a - b).norm() / b.norm()),
        "mean_points": float(difference.mean()),
        "largest_points": float(difference.abs().max()),
    }


def main() -> None:
    logging.disable()
    rows = []
    for name, (network, lengths) in NETWORKS.items():
        for rounds in lengths:
            plain = trained(network, rounds, RATE, "sequential")
            others = {
                "engine": trained(network, rounds, RATE, "stacked"),
                "rate": trained(network, rounds, NUDGED, "sequential"),
            }
            found = {what: apart(plain, other) for what, other in others.items()}
            rows.append({"network": name, "rounds": rounds, **found})
            print(rows[-1], flush=True)
    record = {
        "environment": environment(torch.device("cpu")),
        "learning_rates": [RATE, NUDGED],
        "rows": rows,
    }
    (RESULTS / "chaos.json").write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
