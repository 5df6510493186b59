"""Schedules: how the step size η changes from round to round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from perfed.core.registry import Component, Registry
from perfed.core.schema import option


@dataclass(frozen=True)
class Schedule(Component):
    """Base class of all schedules."""

    registry: ClassVar[Registry[Schedule]]

    def rate(self, first: float, round: int, rounds: int) -> float:
        """η in ``round`` (from 0) of a run of ``rounds``; ``first`` is what it begins with."""
        raise NotImplementedError


schedules: Registry[Schedule] = Registry("schedule")
Schedule.registry = schedules


@schedules.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """η in every round."""

    def rate(self, first: float, round: int, rounds: int) -> float:
        return first


@schedules.register("inverse")
@dataclass(frozen=True)
class Inverse(Schedule):
    """η / (1 + decay·t) in round t, as convergence proofs have it."""

    decay: float = option(0.01, "how fast it falls", ge=0)

    def rate(self, first: float, round: int, rounds: int) -> float:
        return first / (1.0 + self.decay * round)


@schedules.register("cosine")
@dataclass(frozen=True)
class Cosine(Schedule):
    """From η in the first round down to a share of it after the last, along half a cosine."""

    final: float = option(0.0, "share of η that is left at the end", ge=0, le=1)

    def rate(self, first: float, round: int, rounds: int) -> float:
        fallen = (1 - math.cos(math.pi * round / rounds)) / 2
        return first * (1 - (1 - self.final) * fallen)


@schedules.register("steps")
@dataclass(frozen=True)
class Steps(Schedule):
    """Multiplied by a factor once every so many rounds."""

    every: int = option(50, "rounds between two steps", ge=1)
    factor: float = option(0.1, "what each step multiplies η by", gt=0, le=1)

    def rate(self, first: float, round: int, rounds: int) -> float:
        return float(first * self.factor ** (round // self.every))
