"""The search: by validation, never by test, and nothing forgotten."""

import json
from pathlib import Path
from typing import Any

import pytest

from perfed.config import load_yaml
from perfed.core.errors import ConfigError
from perfed.runs.tune import Search, best, shown_value, tables
from tests.conftest import SEQUENTIAL, TINY

GRID = {"training.learning_rate": (0.1, 0.05, 0.01), "algorithm.weight": (0.5, 2.0)}


def fake(validation: float, test: float) -> dict[str, Any]:
    last = {"validation_accuracy": validation, "test_accuracy": test}
    return {"summary": {"models": {"personal": {"last": last}}}, "environment": {}}


def test_the_best_is_best_on_validation_whatever_test_says() -> None:
    search = Search(TINY, GRID, seeds=(7, 8))
    validation = {0.1: 0.5, 0.05: 0.9, 0.01: 0.7}
    records = {
        search.name(choice, seed): fake(
            validation[dict(choice)["training.learning_rate"]] + 0.01 * (seed == 8),
            1 - validation[dict(choice)["training.learning_rate"]],
        )
        for choice in search.choices()
        for seed in (7, 8)
    }
    result = search.result(records)
    assert best(result)["training.learning_rate"] == 0.05
    assert [len(trial["validation_accuracy"]) for trial in result["trials"]] == [2] * 6
    assert len(tables(result)[0].rows) == 6


def test_a_trial_without_all_its_seeds_does_not_count() -> None:
    search = Search(TINY, {"training.learning_rate": (0.1, 0.01)}, seeds=(7, 8))
    first, second = search.choices()
    records = {
        search.name(first, 7): fake(0.99, 0.99),
        search.name(second, 7): fake(0.2, 0.2),
        search.name(second, 8): fake(0.2, 0.2),
    }
    assert best(search.result(records)) == dict(second)


def test_every_trial_is_run_recorded_and_differs_as_the_grid_says(tmp_path: Path) -> None:
    search = Search(TINY, GRID, trials=4)
    study = search.study(tmp_path)
    study.run(SEQUENTIAL)
    result = search.result(study.records())
    assert len(result["trials"]) == result["of"] == 4
    scores = [trial["validation_accuracy"][0] for trial in result["trials"]]
    assert scores == sorted(scores, reverse=True)
    for choice in search.choices():
        config = study.records()[search.name(choice, 1000)]["config"]
        assert config["training"]["learning_rate"] == dict(choice)["training.learning_rate"]
        assert config["algorithm"]["weight"] == dict(choice)["algorithm.weight"]
        assert config["seed"] == 1000


def test_a_drawn_part_of_the_grid_is_a_part_of_it_and_always_the_same() -> None:
    few, everything = Search(TINY, GRID, trials=4).choices(), Search(TINY, GRID).choices()
    assert len(everything) == len(set(everything)) == 6
    assert set(few) < set(everything)
    assert few == Search(TINY, GRID, trials=4).choices()
    assert Search(TINY, GRID, trials=99).choices() == everything


def test_what_diverged_is_said_and_never_chosen(tmp_path: Path) -> None:
    search = Search(TINY, {"training.learning_rate": (1e30, 0.01)})
    study = search.study(tmp_path)
    study.run(SEQUENTIAL)
    result = json.loads(json.dumps(search.result(study.records()), allow_nan=False))
    assert best(result) == {"training.learning_rate": 0.01}
    assert [row[-1] for row in tables(result)[0].rows][-1] == "diverged"


def test_a_result_names_what_all_trials_share_and_not_the_first_of_them() -> None:
    search = Search(TINY, GRID)
    result = search.result({})
    assert result["algorithm"] == "perfed-ckt (clusters=2)"
    assert tables(result)[0].title == "Settings of perfed-ckt (clusters=2)"
    assert result["config"]["algorithm"] == {"name": "perfed-ckt", "clusters": 2}
    assert "learning_rate" not in result["config"]["training"]
    assert result["config"]["training"]["steps"] == 2
    assert "seed" not in result["config"]
    for choice in search.choices():  # and with a choice it is that trial
        again = Search(result["config"], GRID).experiment(choice, 7)
        assert again == search.experiment(choice, 7)


def test_algorithms_that_are_searched_are_all_named() -> None:
    search = Search(TINY | {"algorithm": "local"}, {"algorithm": ("local", "fedavg")})
    assert search.result({})["algorithm"] == "local, fedavg"
    assert "algorithm" not in search.result({})["config"]


@pytest.mark.parametrize("values", [(0.1, 0.1), (1, 1.0), ("uniform", "by-size", "uniform")])
def test_a_value_counts_once(values: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match=r"--grid key: \S+ is there twice; give it once"):
        Search(TINY, {"key": values})


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (Search(TINY, {"selection": ("uniform",)}), "another grid"),
        (Search(TINY, GRID, seeds=(7,)), "other seeds"),
        (Search(TINY | {"rounds": 4}, GRID), "another experiment"),
    ],
)
def test_a_folder_holds_one_search(tmp_path: Path, other: Search, difference: str) -> None:
    search = Search(TINY, GRID, trials=2)
    search.check_folder(tmp_path / "new")
    (tmp_path / "tune.json").write_text(json.dumps(search.result({})))
    search.check_folder(tmp_path)
    Search(TINY, GRID).check_folder(tmp_path)  # more trials of the same
    with pytest.raises(ConfigError, match=f"holds another search, with {difference}; choose"):
        other.check_folder(tmp_path)


def test_one_algorithm_at_a_time() -> None:
    several = TINY | {"algorithms": ["local", "fedavg"]}
    del several["algorithm"]
    with pytest.raises(ConfigError, match="one algorithm is tuned at a time"):
        Search(several, GRID).study("unused")


@pytest.mark.parametrize("value", [0.1, 1e-6, 0.123456789, None, True, 3, "kept", [1, 2]])
def test_a_value_is_shown_as_set_takes_it(value: Any) -> None:
    assert load_yaml(shown_value(value), "--set") == value


def test_words_can_be_tried_too(tmp_path: Path) -> None:
    search = Search(TINY, {"selection": ("uniform", "by-size")})
    study = search.study(tmp_path)
    study.run(SEQUENTIAL)
    shown = {row[0] for row in tables(search.result(study.records()))[0].rows}
    assert shown == {"uniform", "by-size"}
