import numpy as np
import pytest

from perfed.core.metrics import summarize
from perfed.core.selection import select_clients


def test_summaries_say_over_whom_they_average() -> None:
    accuracy = np.array([0.0, 1.0, 0.5, 0.5])
    columns = {
        "test_accuracy": accuracy,
        "test_loss": accuracy,
        "validation_accuracy": 1 - accuracy,
        "validation_loss": accuracy,
    }
    summary = summarize(
        columns,
        train_sizes=np.array([1, 9, 10, 1000]),
        test_sizes=np.array([1, 1, 1, 7]),
        drawn=np.array([False, True, True, False]),
    )
    assert summary["test_accuracy"] == 0.5
    assert summary["test_accuracy_drawn"] == 0.75
    assert summary["test_accuracy_weighted"] == pytest.approx((1 + 0.5 + 3.5) / 10)
    assert summary["test_accuracy_worst_decile"] == 0.0
    assert summary["test_accuracy_by_train_size"] == {"1-9": 0.5, "10-99": 0.5, "1000+": 0.5}
    nobody = summarize(columns, np.ones(4), np.ones(4), np.zeros(4, dtype=bool))
    assert nobody["test_accuracy_drawn"] is None


def test_selection_is_without_replacement_and_by_size() -> None:
    sizes = np.array([1, 1, 8])
    draws = [select_clients(sizes, 2, True, 0, round) for round in range(4000)]
    assert all(len(set(drawn)) == 2 for drawn in draws)
    # P(client 2 is left out) = P(0 then 1) + P(1 then 0) = 2 · 1/10 · 1/9
    assert np.mean([2 not in drawn for drawn in draws]) == pytest.approx(2 / 90, abs=0.008)
    uniform = [select_clients(sizes, 1, False, 0, round)[0] for round in range(3000)]
    assert np.bincount(uniform) == pytest.approx([1000] * 3, abs=110)
