"""What sets groups of clients apart beside their mix of labels: labels that mean something else, or
pictures that look different.

Clients are dealt to groups at random. Group 0 keeps its samples; those of every other group are
changed, a client's train, validation, test and fresh samples alike. All of it follows from the
seed, the client's number and its group. An algorithm is told nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np

from perfed.core.errors import ConfigError
from perfed.core.inputs import Inputs
from perfed.core.registry import Component, Registry
from perfed.core.schema import option
from perfed.core.streams import numpy_stream
from perfed.data.datasets import ClientData, Samples

PICTURE = ", channels×height×width"
Inputting = TypeVar("Inputting", bound=Callable[..., np.ndarray])


def moves_only(inputs: Inputting) -> Inputting:
    """Says of a shift's ``inputs`` that it moves numbers and makes no new ones: what are bytes stay
    bytes. One that takes its place has to say so again."""
    inputs.moves_only = True  # type: ignore[attr-defined]
    return inputs


@dataclass(frozen=True)
class Shift(Component):
    """Of your own: write ``labels``, ``inputs`` or both. Neither is asked for group 0."""

    registry: ClassVar[Registry[Shift]]

    groups: tuple[int, ...] = option(
        (1, 1, 1),
        "groups of clients, drawn in these proportions: [1, 1, 1] are three equal ones, [8, 2] "
        "makes a minority of 20 %, [29, 1] a single odd client of 30",
        ge=1,
    )

    def validate(self) -> None:
        if len(self.groups) < 2:
            raise ConfigError("one group has nothing to differ from: must be at least 2", "groups")

    def check(self, inputs: Inputs, classes: int) -> None:
        """Raise ConfigError where samples like these, with so many classes, cannot be shifted."""

    def labels(
        self, y: np.ndarray, group: int, classes: int, random: np.random.Generator
    ) -> np.ndarray:
        """The labels as ``group`` has them; ``random`` draws the same numbers for every client."""
        return y

    @moves_only
    def inputs(self, x: np.ndarray, group: int, random: np.random.Generator) -> np.ndarray:
        """The samples as ``group`` has them; ``random`` is the client's own."""
        return x

    def takes_bytes(self) -> bool:
        """Whether ``inputs`` may be given pixels as bytes; else it gets numbers from −1 to 1."""
        return getattr(type(self).inputs, "moves_only", False)

    def changes_public(self) -> bool:
        """Whether public samples are shifted, too, each like those of a group drawn for it."""
        return False

    def sizes(self, clients: int) -> np.ndarray:
        """How many of so many clients are in each group."""
        ends = np.round(np.cumsum(self.groups) / sum(self.groups) * clients).astype(int)
        sizes = np.diff(ends, prepend=0)
        if not sizes.all():
            nobodys = int(sizes.argmin())
            raise ConfigError(
                f"of {clients} clients, group {nobodys} gets none: must be fewer groups, or "
                "proportions nearer to each other",
                "shift.groups",
            )
        return sizes

    def deal(self, clients: int, seed: int) -> np.ndarray:
        """The group of each client."""
        ordered = np.repeat(np.arange(len(self.groups)), self.sizes(clients))
        return numpy_stream(seed, "shift-groups").permutation(ordered)


shifts: Registry[Shift] = Registry("shift")
Shift.registry = shifts


@shifts.register("labels")
@dataclass(frozen=True)
class PermutedLabels(Shift):
    """Labels mean something else in each group. The classes stand in a ring, in an order drawn from
    the seed; in group g every label is the one that stands g places further on. So no two groups
    agree on any label."""

    def check(self, inputs: Inputs, classes: int) -> None:
        if len(self.groups) > classes:
            raise ConfigError(
                f"{len(self.groups)} groups cannot disagree on {classes} labels: must be at most "
                f"{classes}",
                "shift.groups",
            )

    def labels(
        self, y: np.ndarray, group: int, classes: int, random: np.random.Generator
    ) -> np.ndarray:
        ring = random.permutation(classes)
        place = np.argsort(ring)
        return np.asarray(ring[(place[y] + group) % classes])


@dataclass(frozen=True)
class InputShift(Shift):
    """Samples themselves are changed, so the public set can be, too."""

    public: bool = option(
        False,
        "change public samples, too, each like a group drawn for it, in the same proportions",
    )

    def changes_public(self) -> bool:
        return self.public

    def strength(self, group: int) -> float:
        """From 0 in group 0 it rises evenly to 1 in the last group."""
        return group / (len(self.groups) - 1)


@shifts.register("rotation")
@dataclass(frozen=True)
class Rotation(InputShift):
    """Square pictures are turned to the left, by 90 degrees in group 1, 180 in group 2 and 270 in
    group 3. No pixel is interpolated."""

    TURNS: ClassVar[int] = 4

    def validate(self) -> None:
        super().validate()
        if len(self.groups) > self.TURNS:
            raise ConfigError(
                f"{len(self.groups)} groups: there are only {self.TURNS} quarter turns", "groups"
            )

    def check(self, inputs: Inputs, classes: int) -> None:
        if not _are_pictures(inputs) or inputs.shape[1] != inputs.shape[2]:
            raise ConfigError(
                f"'rotation' needs square pictures{PICTURE}{_instead(inputs)}", "shift"
            )

    @moves_only
    def inputs(self, x: np.ndarray, group: int, random: np.random.Generator) -> np.ndarray:
        return np.rot90(x, group, axes=(-2, -1))


@shifts.register("noise")
@dataclass(frozen=True)
class Noise(InputShift):
    """Gaussian noise on every number, more of it from group to group. Pixels go from -1 to 1, a
    table's columns have deviation 1; what noise makes larger is not cut off."""

    deviation: float = option(
        0.5, "deviation of the last group's noise; from 0 it rises evenly with the group", gt=0
    )

    def check(self, inputs: Inputs, classes: int) -> None:
        if inputs.tokens:
            raise ConfigError(f"'noise' needs numbers{_instead(inputs)}", "shift")

    def inputs(self, x: np.ndarray, group: int, random: np.random.Generator) -> np.ndarray:
        noise = random.standard_normal(x.shape, dtype=np.float32)
        return np.asarray(x + np.float32(self.deviation * self.strength(group)) * noise)


@shifts.register("contrast")
@dataclass(frozen=True)
class Contrast(InputShift):
    """Pictures fade from group to group: each channel goes towards its own mean."""

    contrast: float = option(
        0.2,
        "share of its contrast that a picture of the last group keeps; from 1 it falls evenly "
        "with the group",
        ge=0,
        lt=1,
    )

    def check(self, inputs: Inputs, classes: int) -> None:
        if not _are_pictures(inputs):
            raise ConfigError(f"'contrast' needs pictures{PICTURE}{_instead(inputs)}", "shift")

    def inputs(self, x: np.ndarray, group: int, random: np.random.Generator) -> np.ndarray:
        kept = np.float32(1 - (1 - self.contrast) * self.strength(group))
        mean = x.mean(axis=(-2, -1), keepdims=True)
        return np.asarray(mean + kept * (x - mean))


def _are_pictures(inputs: Inputs) -> bool:
    return not inputs.tokens and len(inputs.shape) == 3


def _instead(inputs: Inputs) -> str:
    return f"; these samples are {inputs}"


@dataclass(frozen=True)
class Shifting:
    """A shift of one federation: who is in which group, and with which seed."""

    shift: Shift
    groups: np.ndarray
    """Of each client."""
    classes: int
    seed: int

    @classmethod
    def of(cls, shift: Shift, clients: int, inputs: Inputs, classes: int, seed: int) -> Shifting:
        shift.check(inputs, classes)
        return cls(shift, shift.deal(clients, seed), classes, seed)

    def client(self, number: int, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A client's samples and labels after the shift."""
        own = numpy_stream(self.seed, "shift", number)
        return self._changed(int(self.groups[number]), x, y, own)

    def fresh(self, group: int, x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples that all clients of a group are evaluated on."""
        return self._changed(group, x, y, numpy_stream(self.seed, f"shift-fresh/{group}"))

    def _changed(
        self, group: int, x: np.ndarray, y: np.ndarray, own: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        if group == 0:
            return x, y
        common = numpy_stream(self.seed, "shift-labels")
        return self.shift.inputs(x, group, own), self.shift.labels(y, group, self.classes, common)

    def given(self, samples: Samples, x: np.ndarray) -> np.ndarray:
        """Some of ``samples`` as the shift takes them."""
        if self.shift.takes_bytes() or samples.tokens is not None:
            return x
        x = samples.numbers(x)
        return x if np.issubdtype(x.dtype, np.floating) else x.astype(np.float32)

    def public(self, samples: Samples) -> np.ndarray:
        """The public set."""
        if not self.shift.changes_public():
            return samples.public_x
        x = self.given(samples, samples.public_x)
        random, shares = numpy_stream(self.seed, "shift-public"), np.array(self.shift.groups)
        group = random.choice(len(shares), size=len(x), p=shares / shares.sum())
        x = x.copy()
        for number in range(1, len(shares)):
            chosen = group == number
            x[chosen] = self.shift.inputs(x[chosen], number, random)
        return x


class ShiftedData(ClientData):
    """Samples that are made or read for one client at a time, and then shifted."""

    def __init__(self, data: ClientData, shifting: Shifting) -> None:
        self._data = data
        self._shifting = shifting
        self.sizes = data.sizes
        x = shifting.given(data.samples, data.samples.x)
        self.samples: Samples = replace(data.samples, x=x, public_x=shifting.public(data.samples))

    def client(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        x, y = self._data.client(number)
        x, y = self._shifting.client(number, self._shifting.given(self.samples, x), y)
        return np.ascontiguousarray(x), y  # a turned picture is a view with negative strides

    def positions(self, number: int) -> np.ndarray:
        return self._data.positions(number)
