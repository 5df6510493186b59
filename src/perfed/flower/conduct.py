"""Whose answers were refused, round after round; and who is set aside for it.

It is made from the lines of the rounds, so a coordinator that is started again knows it too. A
round counts only where another client's answer was admitted: when nobody's fits, the fault may be
the coordinator's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Conduct:
    """Refused in ``patience`` rounds one after another in which it was asked, a client is set
    aside for ``rounds`` rounds. Then it is asked again: an answer that is admitted ends the matter,
    another refusal sets it aside at once."""

    def __init__(self, patience: int, rounds: int) -> None:
        self._patience = patience
        self._rounds = rounds
        self._refused: dict[int, tuple[int, int, str]] = {}  # how often in a row, when last, why

    def note(self, round: int, admitted: Iterable[int], refused: Mapping[int, str]) -> list[int]:
        """What became of a round's answers; returns who is set aside for it."""
        for client in admitted:
            self._refused.pop(client, None)
        for client, reason in refused.items():
            times, *_ = self._refused.get(client, (0,))
            self._refused[client] = times + 1, round, reason
        return sorted(refused.keys() & self.aside(round + 1).keys())

    def aside(self, round: int) -> dict[int, str]:
        """Who is not asked in this round, and why."""
        return {
            client: f"set aside until round {last + 1 + self._rounds}: its answers were refused "
            f"{times} times in a row, the last one because {reason}"
            for client, (times, last, reason) in sorted(self._refused.items())
            if times >= self._patience and round <= last + self._rounds
        }

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """From ``rounds.jsonl``."""
        for line in lines:
            refused = {int(client): why for client, why in line.get("refused", {}).items()}
            self.note(line["round"], line["clients"], refused)
