"""Ranges: the sampler finds what is known to be best, goes on from records, and bad runs end."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perfed.config import Experiment
from perfed.core.channel import Traffic
from perfed.core.errors import ConfigError, Pruned
from perfed.engines import Execution
from perfed.runs.coordinator import Callback, RoundReport
from perfed.runs.sampling import Range, Told, suggestion
from perfed.runs.study import Study
from perfed.runs.tune import Search, best, tables
from tests.conftest import SEQUENTIAL, TINY

WEIGHT, STEPS, SELECTION = "algorithm.weight", "training.steps", "selection"
GRID = {
    WEIGHT: Range(0.01, 100.0, log=True),
    STEPS: Range(1, 6),
    SELECTION: ("uniform", "by-size"),
}
Objective = Callable[[Experiment], float]


def known(experiment: Experiment) -> float:
    """At most 1: with weight 2, 4 steps and selection by-size."""
    weight: float = experiment.algorithm.weight  # type: ignore[attr-defined]
    lost = math.log10(weight / 2) ** 2 / 16 + (experiment.training.steps - 4) ** 2 / 40
    return 1 - lost - 0.2 * (experiment.selection == "uniform")


class Fake:
    """In the place of a study's runs: the objective is reached in equal steps, and test accuracy
    says the opposite."""

    def __init__(self, objective: Objective, test: Objective = lambda e: 1 - known(e)) -> None:
        self.objective, self.test = objective, test
        self.ran: list[str] = []

    def __call__(
        self, study: Study, names: list[str], how: Execution, callbacks: Sequence[Callback]
    ) -> None:
        for name in names:
            self.ran.append(name)
            experiment = study.experiments[name]
            study._write_record(name, self.record(experiment, callbacks))

    def record(self, experiment: Experiment, callbacks: Sequence[Callback]) -> dict[str, Any]:
        kept = {"config": experiment.to_mapping(), "environment": {}}
        curve: list[list[float]] = []
        for callback in callbacks:
            callback.on_start(experiment, Path(), 0)
        for number in range(experiment.rounds):
            value = self.objective(experiment) * (number + 1) / experiment.rounds
            curve.append([number, self.test(experiment), round(value, 5)])
            report = RoundReport(
                experiment, number, None, Traffic(), 0, {"personal": {"validation_accuracy": value}}
            )
            try:
                for callback in callbacks:
                    callback.on_round(report)
            except Pruned:
                return kept | {"pruned": number + 1, "curve": {"personal": curve}}
        last = {"validation_accuracy": value, "test_accuracy": self.test(experiment)}
        models = {"personal": {"last": last}}
        return kept | {"summary": {"models": models}, "curve": {"personal": curve}}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    def install(*objectives: Objective) -> Fake:
        made = Fake(*objectives)
        monkeypatch.setattr(Study, "_run", lambda *arguments: made(*arguments))
        return made

    return install


def trials(search: Search, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = search.result(search.study(folder).records())["trials"]
    return found


def test_the_known_best_is_found(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    fake(known)
    search = Search(TINY, GRID, trials=60).run(tmp_path, SEQUENTIAL)
    found = best(search.result(search.study(tmp_path).records()))
    assert found[STEPS] == 4
    assert found[SELECTION] == "by-size"
    assert 1 < found[WEIGHT] < 4
    values = [known(search.experiment(choice, 1000)) for choice in search.choices()]
    assert statistics.mean(values[-20:]) > 0.82  # random draws have 0.71, with any seed near it


def test_a_search_that_was_stopped_goes_on_as_if_it_had_not(
    tmp_path: Path, fake: Callable[..., Fake]
) -> None:
    whole = fake(known)
    parts = tmp_path / "parts"
    at_once = Search(TINY, GRID, trials=24).run(tmp_path / "whole", SEQUENTIAL)
    again = fake(known)
    for number in (7, 16, 24):  # nothing is kept between them but records
        resumed = Search(TINY, GRID, trials=number).run(parts, SEQUENTIAL)
    assert again.ran == whole.ran
    assert len(set(again.ran)) == len(again.ran)
    assert trials(resumed, parts) == trials(at_once, tmp_path / "whole")
    assert resumed.run(parts, SEQUENTIAL, seconds=0) == at_once
    other = Search(TINY, GRID, seeds=(7,), trials=24)
    assert other.choices() != at_once.choices()[:1]


def test_test_accuracy_has_no_part_in_it(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    ran = []
    for folder, test in (("opposite", lambda e: 1 - known(e)), ("same", known)):
        made = fake(known, test)
        Search(TINY, GRID, trials=20).run(tmp_path / folder, SEQUENTIAL)
        ran.append(made.ran)
    assert ran[0] == ran[1]


def test_a_bad_trial_is_stopped_recorded_told_and_not_chosen(
    tmp_path: Path, fake: Callable[..., Fake]
) -> None:
    made = fake(known)
    search = Search(TINY | {"rounds": 9}, GRID, seeds=(7, 8), trials=20)
    search = search.run(tmp_path, SEQUENTIAL)
    found = trials(search, tmp_path)
    pruned = [trial for trial in found if "pruned" in trial]
    values = [known(search.experiment(choice, 7)) for choice in search.choices()]
    for number, (choice, value) in enumerate(zip(search.choices(), values, strict=True)):
        complete = [
            values[n]
            for n, other in enumerate(search.choices()[:number])
            if dict(other) not in [trial["choice"] for trial in pruned]
        ]
        bad = len(complete) >= 5 and value < statistics.median(complete)
        assert (dict(choice) in [trial["choice"] for trial in pruned]) is bad
        # Not before a third of the rounds; and its second seed is not begun.
        assert (search.name(choice, 8) in made.ran) is not bad
    assert pruned
    for trial in pruned:
        reached = known(search.experiment(tuple(trial["choice"].items()), 7)) * 4 / 9
        (early,) = trial["pruned"]
        assert early == {"rounds": 4, "validation_accuracy": pytest.approx(reached, abs=1e-5)}
        assert trial["validation_accuracy"] == []
    result = json.loads(json.dumps(search.result(search.study(tmp_path).records())))
    assert best(result) == found[0]["choice"]
    assert tables(result)[0].rows[-1][-1].endswith(", pruned after round 4")


@pytest.mark.parametrize(("log", "expected"), [(True, 0.5), (False, 0.01)])
def test_a_log_range_gives_each_power_of_ten_its_share(log: bool, expected: float) -> None:
    grid = {WEIGHT: Range(0.01, 100.0, log)}
    drawn = [suggestion(grid, seed, [])[0][1] for seed in range(200)]
    assert sum(weight < 1 for weight in drawn) / 200 == pytest.approx(expected, abs=0.1)


def test_what_was_pruned_or_diverged_is_avoided() -> None:
    """As if it were the worst: where all with a small weight was, nothing small is suggested."""
    grid = {WEIGHT: Range(0.0, 1.0)}
    told = [
        Told(((WEIGHT, n / 40),), n / 40 if n > 20 else None, {1: 0.1} if n % 2 else {})
        for n in range(41)
    ]
    for seed in range(5):
        ((_, weight),) = suggestion(grid, seed, told)
        assert weight > 0.5
        assert weight == float(f"{weight:.4g}")


def test_a_real_run_is_pruned_and_one_that_was_interrupted_is_too(tmp_path: Path) -> None:
    """Five complete trials that no run can keep up with; the sixth is trained."""
    values = TINY | {"rounds": 6, "evaluate_every": 2}
    search = Search(values, {"training.learning_rate": Range(0.01, 0.1)}, trials=6)
    perfect = Fake(lambda experiment: 1.0)
    told: list[Told] = []
    for _ in range(5):
        choice = suggestion(search.grid, 1000, told)
        one = replace(search, suggested=(choice,)).study(tmp_path)
        perfect(one, [*one.experiments], SEQUENTIAL, ())
        told.append(Told(choice, 1.0, {}))

    class Interrupt(Callback):
        def on_round(self, report: RoundReport) -> None:
            if report.round == 3:  # saved, but not yet judged
                raise KeyboardInterrupt

    often = replace(SEQUENTIAL, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        search.run(tmp_path, often, [Interrupt()])
    search = search.run(tmp_path, often)
    (last,) = [trial for trial in trials(search, tmp_path) if "pruned" in trial]
    record = search.study(tmp_path).records()[search.name(search.choices()[5], 1000)]
    assert record["pruned"] == last["pruned"][0]["rounds"] == 4
    curve = record["curve"]["personal"]
    assert [number for number, *_ in curve] == [1, 3]
    assert curve[-1][2] == last["pruned"][0]["validation_accuracy"]
    assert search.run(tmp_path, SEQUENTIAL) == search  # and is not run again


def test_a_method_that_uses_validation_is_judged_by_the_other_half() -> None:
    grid = {"training.learning_rate": Range(0.01, 0.1)}
    search = Search(TINY | {"algorithm": "fedfomo"}, grid, trials=2)
    assert search.experiment(search.choices()[0], 1000).split.second_validation


def test_few_different_settings_are_each_run_once(
    tmp_path: Path, fake: Callable[..., Fake]
) -> None:
    made = fake(known)
    Search(TINY, {STEPS: Range(1, 2)}, trials=9).run(tmp_path, SEQUENTIAL)
    assert sorted(made.ran) == ["steps=1-seed1000", "steps=2-seed1000"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.1..10", Range(0.1, 10)),
        ("1e-3..1:log", Range(0.001, 1.0, log=True)),
        ("-1..8", Range(-1, 8)),
        (".5..1.", Range(0.5, 1.0)),
        ("../data", None),
        ("a..b", None),
        ("0.5,2", None),
        ("0.5", None),
        ("2..1", "does not go from a number to a larger one"),
        ("1..nan", "does not go from a number to a larger one"),
        ("0..1:log", "begins at 0; a :log range begins above 0"),
    ],
)
def test_notation(text: str, expected: Range | str | None) -> None:
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"^key: '{text}' {expected}"):
            Range.parse(text, "key")
        return
    assert Range.parse(text, "key") == expected
    if expected:
        assert Range.parse(str(expected), "key") == expected
