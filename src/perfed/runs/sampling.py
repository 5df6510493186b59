"""Ranges of settings: optuna suggests the next trial, and says which run is not worth its end.

Nothing of optuna's is kept. What to try next is a function of the search's seed and of what the
trials before it gave, so that a search whose records are there goes on as if it had never stopped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfed.config import Experiment
from perfed.core.errors import ConfigError, Pruned
from perfed.core.extras import needed
from perfed.core.streams import stream_key
from perfed.runs.coordinator import Callback, RoundReport
from perfed.runs.directory import RunDirectory
from perfed.runs.result import headline

DIGITS = 4  # of a number that is suggested: what is shown and recorded is what was tried
ACCURACY_DECIMALS = 5  # as in a study's records
LOG = ":log"
WARMUP = 3  # no run is pruned in the first third of its rounds
Choice = tuple[tuple[str, Any], ...]
"""One value for each key of the grid."""


@dataclass(frozen=True)
class Range:
    """Every number from ``low`` to ``high``; only whole ones where both are whole."""

    low: int | float
    high: int | float
    log: bool = False
    """Whether 0.1 to 1 counts as much as 1 to 10."""

    @classmethod
    def parse(cls, text: str, where: str) -> Range | None:
        """``0.1..10`` or ``0.1..10:log``; None where the text is no range."""
        ends = re.fullmatch(r"([^.]*\.?[^.]+?)\.\.(.+)", text.removesuffix(LOG))
        try:
            low, high = map(_number, ends.groups() if ends else ())
        except ValueError:
            return None
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"'{text}' does not go from a number to a larger one", where)
        if text.endswith(LOG) and low <= 0:
            raise ConfigError(f"'{text}' begins at {low}; a {LOG} range begins above 0", where)
        return cls(low, high, text.endswith(LOG))

    def __str__(self) -> str:
        return f"{self.low}..{self.high}{LOG if self.log else ''}"

    def rounded(self, value: float) -> int | float:
        if isinstance(value, int):
            return value
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)


@dataclass(frozen=True)
class Told:
    """What a trial gave."""

    choice: Choice
    value: float | None
    """None where it was pruned or diverged."""
    reached: Mapping[int, float]
    """By round, what a pruned one had."""


def suggestion(
    grid: Mapping[str, Sequence[Any] | Range], seed: int, told: Sequence[Told]
) -> Choice:
    """What to try after the trials that were ``told``: by TPE, whose first ones are random."""
    optuna = _optuna()
    distributions = {key: _distribution(optuna, grid[key]) for key in sorted(grid)}
    key = stream_key(seed, "tune", round=len(told))
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=key % 2**32)
    )
    for trial in told:
        ended = "PRUNED" if trial.value is None else "COMPLETE"  # pruned with nothing is the worst
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState[ended],
                value=trial.value,
                params={key: _asked(grid[key], value) for key, value in trial.choice},
                distributions=distributions,
                intermediate_values=dict(trial.reached),
            )
        )
    asked = study.ask(distributions).params
    return tuple((key, _answered(grid[key], asked[key])) for key in distributions)


class Pruning(Callback):
    """Ends a run whose best validation accuracy so far is below the median that complete trials of
    its seed had in the same round: after a third of its rounds, once there are five such trials."""

    def __init__(self, complete: Mapping[int, Sequence[Mapping[int, float]]]) -> None:
        self._complete = complete
        """By seed, each trial's validation accuracy by round."""
        self._trials: dict[int, Any] = {}

    def on_start(self, experiment: Experiment, directory: Path, first_round: int) -> None:
        optuna = _optuna()
        # Before, many clients have not been selected yet, whatever the settings.
        pruner = optuna.pruners.MedianPruner(n_warmup_steps=experiment.rounds // WARMUP)
        study = optuna.create_study(direction="maximize", pruner=pruner)
        for curve in self._complete[experiment.seed]:
            value = curve[max(curve)]
            study.add_trial(optuna.trial.create_trial(value=value, intermediate_values=dict(curve)))
        self._trials[experiment.seed] = study.ask()
        if first_round:  # a resumed run is judged by its earlier rounds too
            for line in RunDirectory(directory).lines("rounds.jsonl"):
                self._judge(experiment, line["round"], line.get("evaluation", {}))

    def on_round(self, report: RoundReport) -> None:
        self._judge(report.experiment, report.round, report.evaluation)

    def _judge(self, experiment: Experiment, number: int, evaluation: Mapping[str, Any]) -> None:
        if not evaluation or number + 1 == experiment.rounds:
            return
        trial = self._trials[experiment.seed]
        accuracy = headline(evaluation)["validation_accuracy"]
        trial.report(round(accuracy, ACCURACY_DECIMALS), number)
        if trial.should_prune():
            raise Pruned(f"pruned after round {number + 1} of {experiment.rounds}")


def _optuna() -> Any:
    optuna = needed("optuna", "tune", "--grid with a range")
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # else a line for every study in memory
    return optuna


def _distribution(optuna: Any, values: Sequence[Any] | Range) -> Any:
    kinds = optuna.distributions
    if not isinstance(values, Range):  # by its place: optuna takes few kinds of values
        return kinds.CategoricalDistribution(range(len(values)))
    whole = isinstance(values.low, int) and isinstance(values.high, int)
    kind = kinds.IntDistribution if whole else kinds.FloatDistribution
    return kind(values.low, values.high, log=values.log)


def _asked(values: Sequence[Any] | Range, value: Any) -> Any:
    return value if isinstance(values, Range) else values.index(value)


def _answered(values: Sequence[Any] | Range, answer: Any) -> Any:
    return values.rounded(answer) if isinstance(values, Range) else values[answer]


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
