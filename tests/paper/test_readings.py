"""benchmarks/readings.py: every reading is another experiment, and only in what it says."""

import sys
from pathlib import Path
from typing import Any

import pytest

import perfed

sys.path.insert(0, str(Path(perfed.__file__).parents[2] / "benchmarks"))
import readings

NAMES = list(readings.READINGS)


def planned(reading: int, method: str) -> dict[str, Any]:
    return readings.study().experiments[readings.run_name(reading, method, 0)].to_mapping()


def differences(reading: int, method: str) -> set[str]:
    first, other = planned(0, method), planned(reading, method)
    return {key for key in first if first[key] != other[key]}


@pytest.mark.parametrize("reading", range(1, len(NAMES)), ids=NAMES[1:])
def test_a_reading_changes_what_it_names(reading: int) -> None:
    changes = readings.READINGS[NAMES[reading]]
    sections = {key for key in changes if key not in ("local", "perfed-ckt")}
    for method in readings.METHODS:
        own = {"algorithm"} if method.startswith(tuple(changes)) else set()
        length = {"rounds", "evaluate_every"} if method in changes else set()
        assert differences(reading, method) == sections | own | length


def test_local_training_makes_as_many_steps_as_the_others() -> None:
    """All clients in some rounds, or those that are selected in every round."""
    for number, name in enumerate(NAMES):
        local, other = planned(number, "local"), planned(number, "perfed-ckt-1")
        everybody = local["algorithm"]["participation"] == "all"
        share = other["clients_per_round"] / other["clients"] if everybody else 1
        assert local["rounds"] == share * other["rounds"], name


def test_a_sum_over_a_mini_batch_is_its_size_times_the_mean() -> None:
    first = planned(0, "perfed-ckt-3")
    summed = planned(
        NAMES.index("agreement summed over a mini-batch, not averaged"), "perfed-ckt-3"
    )
    ratio = summed["algorithm"]["weight"] / first["algorithm"]["weight"]
    assert ratio == first["training"]["public_batch_size"]


def test_quick_needs_no_download() -> None:
    quick = readings.study(quick=True).experiments
    assert len(quick) == 6 * 3 * 3
    assert {e.data.registered_name for e in quick.values()} == {"digits"}
