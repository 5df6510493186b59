"""What crosses in a round with each of the package's methods, in one fixed setting, by the channel.

python benchmarks/method_costs.py   writes benchmarks/results/method_costs.json: a minute and a half
                                    on one core; 'python benchmarks/render.py' shows it in the docs

All clients are selected in every round. The first round is left out: many methods send nothing
down in it.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import torch
from committed import RESULTS
from sklearn.datasets import load_digits

import perfed
from perfed.core.algorithm import Sends
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.runs.directory import environment

PUBLIC = 1000
SETTING: dict[str, Any] = {
    "clients": 6,  # FedFomo sends a client up to five models of others
    "clients_per_round": 6,
    "rounds": 3,
    "evaluate_every": 3,
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "models": ["cnn4"],
    "training": {"steps": 1, "batch_size": 16, "public_batch_size": 16, "learning_rate": 0.05},
    "seed": 0,
}
SHORTER = {  # of what these send only the values depend on it, never how many
    "cosmos": {"digest_steps": 1, "steps": 1},
    "feddf": {"steps": 1},
    "kt-pfl": {"digest_steps": 1},
    "selective-fd": {"digest_steps": 1},
}
COUNTS = ("up_parameters", "down_parameters", "up_bytes", "down_bytes")


class EachRecipient(Channel):
    """Counts a broadcast once for each client that gets it: the cost of one client."""

    def down(
        self, messages: Mapping[int, Message], sent: Mapping[int, Message] | None = None
    ) -> None:
        for client, message in messages.items():
            super().down({client: message}, {client: (sent or messages)[client]})


def methods() -> Iterator[tuple[str, str]]:
    """The package's own, each with what its clients send: in the order in which they are listed."""
    for sends in get_args(Sends):
        for name in sorted(perfed.algorithms):
            cls = perfed.algorithms[name]
            if cls.sends == sends and cls.__module__.startswith("perfed."):
                yield name, sends


def pictures(path: Path) -> None:
    """The embedded digits, each point drawn as 4×4: pictures of 32×32."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = np.kron(digits.images / 8 - 1, np.ones((1, 4, 4)))[order, None].astype(np.float32)
    y = digits.target[order]
    np.savez(path, x=x[PUBLIC:], y=y[PUBLIC:], public=x[:PUBLIC])


def crossed(name: str, folder: Path) -> dict[str, float]:
    """Of one client in one round after the first, on average."""
    data = {"name": "npz", "path": str(folder / "pictures.npz")}
    algorithm = {"name": name, **SHORTER.get(name, {})}
    experiment = perfed.Experiment(data=data, algorithm=algorithm, **SETTING)
    with mock.patch("perfed.runs.coordinator.Channel", EachRecipient):
        perfed.run(experiment, folder / name)
    lines = [json.loads(line) for line in (folder / name / "rounds.jsonl").open()]
    later = [line for line in lines if line["round"] > 0]
    return {
        count: statistics.mean(line["traffic"][count] / len(line["clients"]) for line in later)
        for count in COUNTS
    }


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        pictures(Path(folder) / "pictures.npz")
        for name, sends in methods():
            began = time.monotonic()
            rows.append({"method": name, "sends": sends, **crossed(name, Path(folder))})
            print(f"{name}: {time.monotonic() - began:.1f} s", file=sys.stderr)
    record = {
        "data": f"Digits drawn as 32×32, 10 classes, {PUBLIC:,} of them the public set",
        "setting": SETTING,
        "shorter": SHORTER,
        "parameters": next(row["up_parameters"] for row in rows if row["method"] == "fedavg"),
        "rows": rows,
        "environment": environment(torch.device("cpu")),
    }
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / "method_costs.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
