"""From one number per client to numbers one can report, each saying over whom it averages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

MODEL_NAMES = {"personal": "LM", "global": "GM"}
QUANTITIES = ("accuracy", "loss")
PARTS = ("validation", "test")
SIZE_GROUPS = ((1, 9), (10, 99), (100, 999), (1000, None))

Columns = Mapping[str, np.ndarray]  # "test_accuracy" → one number per client


def size_group_name(low: int, high: int | None) -> str:
    return f"{low}-{high}" if high is not None else f"{low}+"


def summarize(
    columns: Columns, train_sizes: np.ndarray, test_sizes: np.ndarray, drawn: np.ndarray
) -> dict[str, Any]:
    """The averages of one model kind in one round.

    ``mean`` is over all clients, ``drawn`` over those that trained at least once, ``weighted`` by
    test samples (so it is the accuracy over all test data), ``worst_decile`` over the tenth of
    the clients that fare worst, ``by_train_size`` by group of training-set size.
    """
    accuracy = columns["test_accuracy"]
    return {
        "test_accuracy": _mean(accuracy),
        "test_loss": _mean(columns["test_loss"]),
        "validation_accuracy": _mean(columns["validation_accuracy"]),
        "validation_loss": _mean(columns["validation_loss"]),
        "test_accuracy_drawn": _mean(accuracy[drawn]),
        "test_accuracy_weighted": float(np.average(accuracy, weights=test_sizes)),
        "test_accuracy_worst_decile": _mean(np.sort(accuracy)[: max(1, len(accuracy) // 10)]),
        "test_accuracy_by_train_size": {
            size_group_name(low, high): _mean(accuracy[inside])
            for low, high in SIZE_GROUPS
            if (inside := (train_sizes >= low) & (train_sizes <= (high or np.inf))).any()
        },
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
