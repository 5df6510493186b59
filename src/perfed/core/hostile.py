"""Hostile clients, for simulations: what they send in the place of what an honest client sends.

An experiment names an attack, ``hostile: {name: flipped, share: 0.3}``. The seed draws who is
hostile; a larger share has the clients of a smaller one, and more. A hostile client trains like an
honest one, and then lies. It sends what admission accepts, in every method: an attack says for each
kind of array that methods declare what comes instead.

* class rows: soft decisions or logits, a row for each public sample or class;
* features: other numbers, such as a class's mean features;
* parameters: of a model that the client sends;
* claims: numbers between two bounds, such as what a client says it has gained.

Counts and choices (a cluster's index, say) stay as they are, apart from the number of samples: a
hostile client may tell a false one on joining.

An attack of your own is a registered class with some of these methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from perfed.core.declaration import (
    LARGEST,
    Array,
    Entries,
    Entry,
    Known,
    Leaf,
    Maybe,
    Model,
    Numbered,
    PerParameter,
    Probabilities,
    Reals,
    SampleCount,
)
from perfed.core.message import Message
from perfed.core.registry import Component, Registry
from perfed.core.schema import option
from perfed.core.streams import numpy_stream
from perfed.core.tree import escaped, find_not_finite


@dataclass(frozen=True)
class Attacker:
    """A hostile client in a round, and what it has to go by."""

    seed: int
    client: int
    round: int
    known: Known
    """What the server knows of it; with what it was sent."""

    def random(self, path: str) -> np.random.Generator:
        """Numbers of its own."""
        return numpy_stream(self.seed, f"hostile/{path}", self.client, self.round)

    def common(self, path: str) -> np.random.Generator:
        """The same numbers for all hostile clients, in all rounds."""
        return numpy_stream(self.seed, f"hostile-common/{path}")

    def received(self, path: str, like: Tensor) -> Tensor:
        """What it was sent by this name, or zeros."""
        found = self.known.received.arrays.get(path)
        same = found is not None and found.shape == like.shape
        return found.to(like) if found is not None and same else torch.zeros_like(like)

    def believed(self, rows: Tensor) -> Tensor:
        """What the server last told of the same rows and classes, or else what it says itself."""
        for found in self.known.received.arrays.values():
            if found.is_floating_point() and found.shape[-2:] == rows.shape:
                return found.reshape(-1, *rows.shape).mean(0).to(rows)
        return rows

    def last_layer(self) -> str:
        """Of its own network."""
        return self.known.head("") or [*self.known.model("").params][-1].rpartition(".")[0]

    def renaming(self, classes: int) -> Tensor:
        """Another class for each class; all hostile clients agree on it."""
        order = self.common("renaming").permutation(classes)
        renamed = np.empty(classes, dtype=np.int64)
        renamed[order] = np.roll(order, 1)
        return torch.from_numpy(renamed)


@dataclass(frozen=True)
class Attack(Component):
    """What some of the clients send instead; by itself what an honest client would."""

    registry: ClassVar[Registry[Attack]]

    share: float = option(
        0.3, "share of the clients that are hostile, drawn by the seed", ge=0, le=1
    )
    samples: float = option(
        1.0,
        "how many times its number of samples a hostile client claims to have",
        gt=0,
        le=1e9,
    )

    def clients(self, clients: int, seed: int) -> np.ndarray:
        """Which of so many clients are hostile, as a mask."""
        first = numpy_stream(seed, "hostile-clients").permutation(clients)
        mask = np.zeros(clients, dtype=bool)
        mask[first[: round(self.share * clients)]] = True
        return mask

    def told(self, samples: int) -> int:
        return max(1, round(samples * self.samples))

    # What comes instead.

    def rows(self, rows: Tensor, who: Attacker, path: str) -> Tensor:
        """Of soft decisions or logits, classes along the last dimension."""
        return rows

    def features(self, values: Tensor, who: Attacker, path: str) -> Tensor:
        return values

    def parameter(self, own: Tensor, sent: Tensor, who: Attacker, path: str) -> Tensor:
        """Of one tensor of a model; ``sent`` is what the server sent, or zero."""
        return own

    def claim(self, values: Tensor, low: float, high: float, who: Attacker, path: str) -> Tensor:
        """As much as can be claimed."""
        return torch.full_like(values, high)

    def message(self, honest: Message, declared: Entries | None, who: Attacker) -> Message | None:
        """What is sent; None: nothing."""
        if find_not_finite({who.client: [*honest.arrays.items()]}):
            return honest  # its training has diverged: there is nothing to lie about
        said = dict(honest.arrays)
        for name, entry in (declared or {}).items():
            kind, path = _innermost(entry), escaped(name)
            for leaf_path, leaf in entry.leaves(path, honest, who.known).items():
                if leaf_path in said:
                    lie = self._said(said[leaf_path], kind, leaf, leaf_path, who)
                    said[leaf_path] = lie.to(said[leaf_path])
        return Message.from_arrays(said)

    def _said(self, values: Tensor, kind: Entry, leaf: Leaf, path: str, who: Attacker) -> Tensor:
        if isinstance(leaf.range, SampleCount):
            return torch.as_tensor(who.known.samples)
        if not values.is_floating_point():
            return values
        if isinstance(kind, Model | PerParameter):
            if {"buffers", "public_buffers"} & {*path.split("/")}:
                return values
            return self.parameter(values, who.received(path, values), who, path)
        if isinstance(leaf.range, Probabilities):
            return leaf.range.nearest(self.rows(values, who, path))
        if type(leaf.range) is not Reals or not values.ndim:
            return values
        if isinstance(kind, Array) and "F" in kind.shape:
            return leaf.range.nearest(self.features(values, who, path))
        if leaf.range.low > -LARGEST and leaf.range.high < LARGEST:
            return self.claim(values, leaf.range.low, leaf.range.high, who, path)
        if isinstance(kind, Array) and kind.shape[-1:] == ("N",):
            return self.rows(values, who, path)
        return self.features(values, who, path)


attacks: Registry[Attack] = Registry("attack")
Attack.registry = attacks


@attacks.register("silent")
@dataclass(frozen=True)
class Silent(Attack):
    """They send nothing. What honest clients lose then is not a lie's fault."""

    def message(self, honest: Message, declared: Entries | None, who: Attacker) -> Message | None:
        return None


@attacks.register("random")
@dataclass(frozen=True)
class Random(Attack):
    """Random numbers, of the size that an honest client's have."""

    def rows(self, rows: Tensor, who: Attacker, path: str) -> Tensor:
        if _are_probabilities(rows):
            drawn = torch.from_numpy(who.random(path).exponential(size=tuple(rows.shape)))
            return (drawn / drawn.sum(-1, keepdim=True)).to(rows)
        return self.features(rows, who, path)

    def features(self, values: Tensor, who: Attacker, path: str) -> Tensor:
        return values.mean() + _spread(values) * _normal(values, who.random(path))

    def parameter(self, own: Tensor, sent: Tensor, who: Attacker, path: str) -> Tensor:
        return _spread(own) * _normal(own, who.random(path))

    def claim(self, values: Tensor, low: float, high: float, who: Attacker, path: str) -> Tensor:
        drawn = who.random(path).uniform(low, high, size=tuple(values.shape))
        return torch.from_numpy(drawn).to(values)


@attacks.register("constant")
@dataclass(frozen=True)
class Constant(Attack):
    """The same class for every sample, each client its own; models of zeros."""

    def rows(self, rows: Tensor, who: Attacker, path: str) -> Tensor:
        favourite = int(
            numpy_stream(who.seed, "hostile-class", who.client).integers(rows.shape[-1])
        )
        return _certain(rows, torch.full(rows.shape[:-1], favourite))

    def features(self, values: Tensor, who: Attacker, path: str) -> Tensor:
        return values.mean().expand_as(values)

    def parameter(self, own: Tensor, sent: Tensor, who: Attacker, path: str) -> Tensor:
        return torch.zeros_like(own)


@attacks.register("flipped")
@dataclass(frozen=True)
class Flipped(Attack):
    """The likeliest class becomes the least likely one; a model's update is turned round."""

    strength: float = option(1.0, "how many times as long the turned update is", gt=0)

    def rows(self, rows: Tensor, who: Attacker, path: str) -> Tensor:
        ordered, place = rows.sort(-1)
        return torch.empty_like(rows).scatter_(-1, place, ordered.flip(-1))

    def features(self, values: Tensor, who: Attacker, path: str) -> Tensor:
        return -self.strength * values

    def parameter(self, own: Tensor, sent: Tensor, who: Attacker, path: str) -> Tensor:
        return sent - self.strength * (own - sent)


@attacks.register("scaled")
@dataclass(frozen=True)
class Scaled(Attack):
    """Everything is said too loudly: certain answers, a model's update many times as long."""

    strength: float = option(10.0, "how many times as long", gt=0)

    def rows(self, rows: Tensor, who: Attacker, path: str) -> Tensor:
        return _certain(rows, rows.argmax(-1)) if _are_probabilities(rows) else self.strength * rows

    def features(self, values: Tensor, who: Attacker, path: str) -> Tensor:
        return self.strength * values

    def parameter(self, own: Tensor, sent: Tensor, who: Attacker, path: str) -> Tensor:
        return sent + self.strength * (own - sent)


@attacks.register("colluding")
@dataclass(frozen=True)
class Colluding(Attack):
    """All hostile clients say the same wrong thing in every round: one random label for each
    sample, one random model."""

    def rows(self, rows: Tensor, who: Attacker, path: str) -> Tensor:
        labels = who.common(path).integers(rows.shape[-1], size=tuple(rows.shape[:-1]))
        return _certain(rows, torch.from_numpy(labels))

    def features(self, values: Tensor, who: Attacker, path: str) -> Tensor:
        return _spread(values) * _normal(values, who.common(path))

    def parameter(self, own: Tensor, sent: Tensor, who: Attacker, path: str) -> Tensor:
        return _spread(own) * _normal(own, who.common(path))


@attacks.register("worst")
@dataclass(frozen=True)
class Worst(Flipped):
    """As much loss as one answer can make: certain of the class that is least likely by what the
    server told last, or by its own model; an update turned round, and longer."""

    strength: float = option(5.0, "how many times as long the turned update is", gt=0)

    def rows(self, rows: Tensor, who: Attacker, path: str) -> Tensor:
        return _certain(rows, who.believed(rows).argmin(-1))


@attacks.register("confusing")
@dataclass(frozen=True)
class Confusing(Attack):
    """Every class goes by the name of another, the same for all hostile clients: as if they had
    been trained with exchanged labels."""

    def rows(self, rows: Tensor, who: Attacker, path: str) -> Tensor:
        return rows[..., who.renaming(rows.shape[-1]).to(rows.device)]

    def features(self, values: Tensor, who: Attacker, path: str) -> Tensor:
        """Rows are classes."""
        return values[who.renaming(len(values)).to(values.device)]

    def parameter(self, own: Tensor, sent: Tensor, who: Attacker, path: str) -> Tensor:
        """The last layer gives a number for each class; a head's names are those inside it."""
        classes, inside = who.known.sizes["N"], path.rpartition("/")[2]
        layer = inside.rpartition(".")[0]
        if (layer and layer != who.last_layer()) or not own.ndim or len(own) != classes:
            return own
        return own[who.renaming(classes).to(own.device)]


def _innermost(entry: Entry) -> Entry:
    while isinstance(entry, Numbered | Maybe):
        entry = entry.entry
    return entry


def _are_probabilities(rows: Tensor) -> bool:
    return bool((rows >= 0).all()) and bool(((rows.sum(-1) - 1).abs() < 0.01).all())


def _certain(rows: Tensor, labels: Tensor) -> Tensor:
    """Sure of these labels: as sure as an honest client ever is, where rows are logits."""
    low, high = (0.0, 1.0) if _are_probabilities(rows) else (float(rows.min()), float(rows.max()))
    chosen = one_hot(labels.to(rows.device), rows.shape[-1]).to(rows)
    return low + (high - low) * chosen


def _spread(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else values.abs().sum()


def _normal(like: Tensor, random: np.random.Generator) -> Tensor:
    return torch.from_numpy(random.normal(size=tuple(like.shape))).to(like)


def honest_ones(facts: Mapping[str, np.ndarray], clients: int) -> np.ndarray:
    """Which of the clients are honest, by what a partition records."""
    hostile = facts.get("hostile")
    return np.ones(clients, dtype=bool) if hostile is None else ~np.asarray(hostile)
