"""Tables 1 and 2 as the paper prints them: accuracy in %, deviation over seeds, and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FRACTIONS = (0.10, 0.15)
"""C: the share of clients that are selected in a round."""


@dataclass(frozen=True)
class Row:
    """One row. Each entry of the last two is for C=0.10 and C=0.15."""

    label: str
    algorithm: Mapping[str, Any]
    kind: str
    """Which of a client's models it is: personal (LM in the paper) or global (GM)."""
    accuracy: tuple[tuple[float, float], tuple[float, float]] | None
    """Mean and standard deviation; None for a row that the paper lacks."""
    cost: tuple[float, float] | None = None
    """In units of 10⁷ parameters."""

    def published(self, fraction: float) -> tuple[float, float] | None:
        if self.accuracy is None or fraction not in FRACTIONS:
            return None
        return self.accuracy[FRACTIONS.index(fraction)]

    def published_cost(self, fraction: float) -> float | None:
        if self.cost is None or fraction not in FRACTIONS:
            return None
        return self.cost[FRACTIONS.index(fraction)]


def _perfed_ckt(clusters: int, at_10: tuple[float, float], at_15: tuple[float, float]) -> Row:
    spec = {"name": "perfed-ckt", "clusters": clusters}
    cost = (round(4.0 + 0.4 * clusters, 1), round(6.0 + 0.4 * clusters, 1))
    return Row(f"PerFed-CKT (c={clusters})", spec, "personal", (at_10, at_15), cost)


def _hypcluster(
    clusters: int,
    at_10: tuple[float, float],
    at_15: tuple[float, float],
    cost: tuple[float, float],
) -> Row:
    spec = {"name": "hypcluster", "clusters": clusters}
    return Row(f"HypCluster (c={clusters})", spec, "personal", (at_10, at_15), cost)


ONE_MODEL = (2150.0, 3120.0)

MAJORITY = Row("majority label", {"name": "majority"}, "personal", None)
"""Not in the paper: how far naming each client's most frequent label goes."""
FEDAVG_FT = Row("FedAvg-FT", {"name": "fedavg-ft"}, "personal", None)
"""Not in the paper: the plainest personalization."""
SUCCESSOR = Row("PerFed-Kin", {"name": "perfed-kin"}, "personal", None)
"""Not in the paper: see docs/successor.md."""

# As many candidates as there are models: the paper's cost says that all m are sent.
FEDFOMO = {"name": "fedfomo", "candidates": 15}
FEDFOMO_TRAINED = FEDFOMO | {"fallback": "trained"}
"""Not its authors': where no model helps, a client keeps what it has trained."""

TABLE_1 = (
    MAJORITY,
    Row("local training", {"name": "local"}, "personal", ((64.02, 0.48), (64.02, 0.48))),
    Row("FedAvg", {"name": "fedavg"}, "global", ((15.53, 1.42), (20.00, 2.66)), ONE_MODEL),
    FEDAVG_FT,
    Row("FedProx", {"name": "fedprox"}, "global", ((13.64, 1.23), (16.71, 1.79)), ONE_MODEL),
    Row("Scaffold", {"name": "scaffold"}, "global", ((12.92, 1.46), (16.41, 1.14)), ONE_MODEL),
    Row("FedDF", {"name": "feddf"}, "global", ((15.18, 1.18), (17.09, 1.54)), ONE_MODEL),
    Row(
        "Per-FedAvg (GM)",
        {"name": "per-fedavg"},
        "global",
        ((14.47, 0.59), (14.61, 0.83)),
        ONE_MODEL,
    ),
    Row(
        "Per-FedAvg (LM)",
        {"name": "per-fedavg"},
        "personal",
        ((51.74, 1.52), (50.25, 1.61)),
        ONE_MODEL,
    ),
    Row("Ditto (LM)", {"name": "ditto"}, "personal", ((67.21, 1.86), (68.88, 1.95)), ONE_MODEL),
    Row("Ditto (GM)", {"name": "ditto"}, "global", ((21.63, 2.13), (19.16, 2.34)), ONE_MODEL),
    Row("FedFomo", FEDFOMO, "personal", ((74.62, 0.42), (77.56, 0.75)), (3900.0, 5850.0)),
    Row("FedFomo (trained kept)", FEDFOMO_TRAINED, "personal", None),
    _hypcluster(2, (34.11, 2.63), (28.70, 3.03), (2340.0, 3320.0)),
    _hypcluster(3, (39.17, 2.64), (41.99, 2.48), (2540.0, 3510.0)),
    _hypcluster(5, (52.51, 1.37), (51.92, 1.64), (2930.0, 3900.0)),
    _hypcluster(6, (65.77, 2.76), (63.28, 1.16), (3120.0, 4100.0)),
    _perfed_ckt(1, (70.70, 0.46), (67.66, 0.30)),
    _perfed_ckt(2, (73.33, 0.26), (70.86, 0.73)),
    _perfed_ckt(3, (74.31, 0.40), (76.74, 0.71)),
    _perfed_ckt(4, (72.67, 0.31), (73.52, 1.15)),
    SUCCESSOR,
)

TABLE_2 = (
    MAJORITY,
    Row("local training", {"name": "local"}, "personal", ((59.29, 1.05), (59.29, 1.05))),
    Row("FedDF", {"name": "feddf"}, "global", ((15.25, 1.21), (14.16, 1.11)), (1780.0, 2620.0)),
    _perfed_ckt(1, (70.94, 0.46), (70.77, 0.14)),
    _perfed_ckt(2, (72.25, 0.17), (76.14, 0.73)),
    _perfed_ckt(3, (71.84, 0.40), (76.02, 0.66)),
    _perfed_ckt(4, (70.01, 0.31), (73.14, 0.61)),
    SUCCESSOR,
)

WEIGHT = 2.0
"""λ, the paper's best; the other settings it names are in the preset paper-cifar10."""

DISTILLATION_STEPS = 400
"""A round, of FedDF: its default is too few for networks with BatchNorm (docs/reproduction.md)."""

GRID = {
    "training.learning_rate": (0.1, 0.05, 0.01, 0.005, 0.001),
    "training.batch_size": (32, 64, 128),
    "training.steps": (10, 30, 50),
    "training.public_batch_size": (32, 64, 128),
    "algorithm.weight": (0.05, 0.1, 0.5, 1.0, 2.0, 4.0),
}
"""What the paper searched; it chose by test accuracy, perfed tune chooses by validation."""
