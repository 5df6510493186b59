"""Whether the server's state has turned bad, as far as the coordinator can see.

Two signs, beside a state that is not finite: fewer than half of those who answered were admitted,
where before it was half or more; and the sites' own validation accuracy, the median over them, is
below half of the best there was. Each is said when it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from perfed.flower.numbers import Numbers
from perfed.runs.result import headline


class Watch:
    """What was seen in each round; a line of ``rounds.jsonl`` has it as ``watched``."""

    def __init__(self) -> None:
        self.best_round: int | None = None
        """After which the median of the sites' validation accuracies was highest."""
        self._best = 0.0
        self._last: dict[str, bool] = {}

    def note(self, round: int, seen: Mapping[str, Any]) -> list[str]:
        """What turned bad in this round."""
        answered, admitted = seen["answered"], seen["admitted"]
        accuracy = seen.get("validation_accuracy")
        signs = {"answers": 2 * admitted < answered, "accuracy": self._last.get("accuracy", False)}
        if accuracy is not None:
            signs["accuracy"] = accuracy < self._best / 2
            if accuracy >= self._best:
                self._best, self.best_round = accuracy, round
        words = {
            "answers": f"{admitted} of {answered} answers were admitted",
            "accuracy": f"the sites' validation accuracy is {100 * (accuracy or 0):.1f} %, "
            f"and was {100 * self._best:.1f} % after round {self.best_round}",
        }
        before, self._last = self._last, signs
        return [words[sign] for sign, is_bad in signs.items() if is_bad and not before.get(sign)]

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """From ``rounds.jsonl``."""
        for line in lines:
            if "watched" in line:
                self.note(line["round"], line["watched"])


def typical_accuracy(numbers: Mapping[int, Numbers]) -> float:
    """The median of what sites say of their models: a minority cannot move it far."""
    return float(median(headline(told)["validation_accuracy"] for told in numbers.values()))
