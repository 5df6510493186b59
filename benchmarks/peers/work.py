"""What a worker has to do, read from the folder that the driver made. Needs numpy alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
Models = dict[str, list[Arrays]]
"""By kind, "global" or "personal": one for everybody, or one for each client."""


@dataclass(frozen=True)
class Work:
    folder: Path
    algorithm: str
    network: str  # a class in networks.py, or a group of perfed's
    clients: int
    clients_per_round: int
    steps: int  # of one client in one round: one epoch
    batch_size: int
    learning_rate: float
    classes: int
    device: str
    threads: int
    weight: float = 0.0  # of Ditto's pull
    clusters: int = 0  # of HypCluster
    experiment: dict[str, Any] | None = None  # the same work for perfed

    @classmethod
    def read(cls, folder: Path) -> Work:
        return cls(folder, **json.loads((folder / "work.json").read_text()))

    @cached_property
    def train(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Samples and labels of each client, channels first."""
        return self._samples("train")

    @cached_property
    def test(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return self._samples("test")

    def _samples(self, part: str) -> list[tuple[np.ndarray, np.ndarray]]:
        file = np.load(self.folder / f"{part}.npz")
        x, y, ends = (file[name] for name in ("x", "y", "ends"))
        return list(zip(np.split(x, ends[:-1]), np.split(y, ends[:-1]), strict=True))

    def initial(self, number: int = 0, network: int = 0) -> Arrays:
        """Parameters and buffers by name, as torch has them, from which model ``number`` of a
        network starts."""
        return dict(np.load(self.folder / f"initial_{network}_{number}.npz"))
