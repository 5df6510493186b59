"""What an algorithm's messages hold, said beforehand: names, shapes, types and ranges.

An algorithm says it once, in :meth:`perfed.core.algorithm.Algorithm.messages`::

    def messages(self):
        decisions = Array(("P", "N"), PROBABILITIES)
        return Messages(up={"soft_decisions": decisions, "samples": SAMPLES}, down={}, ...)

The declaration is what ``merge`` may rely on. Every message is measured by it, alone, before it is
used, and what a lossy stage of the wire has blurred is brought back into it
(:mod:`perfed.core.admission`); ``perfed explain`` prints it (:func:`lines`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.network import base_of, head_tensors
from perfed.core.tree import Weights, escaped, flatten

TOLERANCE = 2**-7
"""How far from 1 the sum of a row of probabilities may be. In bf16 a number has 8 bits, so each
probability is off by at most 2⁻⁸ of itself, and so is their sum; as much again is for a
normalising sum that was itself rounded. In float32 all of this is below 1e-4."""

LARGEST = torch.finfo(torch.float32).max / 1e6
"""No number may be larger, in either direction: so the sum over a million clients is a number."""

Entries = Mapping[str, "Entry"]


@dataclass(frozen=True)
class Known:
    """What is known of a client without its message: what the symbols in a declaration stand for
    there, and what the client told on joining."""

    sizes: Mapping[str, int]
    """P: the samples of the public set. N: the classes. F: the width of features; a size that is
    not known here may be any, the same in the whole message."""
    samples: int
    model: Callable[[str], Weights]
    """A model of the client's architecture, or of another network that the algorithm names."""
    head: Callable[[str], str] = lambda network: ""
    """The name of its last layer, its head."""
    received: Message = field(default_factory=Message)
    """What the client was sent in this round."""


# Ranges.


class Range(ABC):
    """Which numbers an array may hold. All must be finite, and none larger than ``LARGEST``."""

    dtype: torch.dtype | Literal["floating"] | None = "floating"
    """``floating`` is torch's default type, None any type."""

    @abstractmethod
    def words(self) -> str:
        """For people: ``probabilities``."""

    def holds(self, values: Tensor, known: Known) -> Tensor:
        """Whether (a 0-dimensional bool) these numbers, which are finite, are in the range."""
        return torch.ones((), dtype=torch.bool, device=values.device)

    def fault(self, values: Tensor, known: Known) -> str:
        """Why they are not, and what would be right."""
        return f"must be {self.words()}"

    def nearest(self, values: Tensor) -> Tensor:
        """The numbers in the range that are nearest to these."""
        return values


@dataclass(frozen=True)
class Probabilities(Range):
    """Rows (along the last dimension) that are not negative and sum to 1."""

    def words(self) -> str:
        return "probabilities"

    def holds(self, values: Tensor, known: Known) -> Tensor:
        sums = values.double().sum(-1)
        return (values >= 0).all() & ((sums - 1).abs() <= TOLERANCE).all()

    def fault(self, values: Tensor, known: Known) -> str:
        rows = values.double().reshape(-1, values.shape[-1])
        off = (rows.sum(1) - 1).abs() > TOLERANCE
        if off.any():
            row = int(off.int().argmax())
            return f"row {row} sums to {float(rows[row].sum()):.6g}, must be 1"
        row = int((rows < 0).any(1).int().argmax())
        return f"row {row} has {float(rows[row].min()):.6g}, must not be negative"

    def nearest(self, values: Tensor) -> Tensor:
        """In squared ℓ2, row by row: the projection on the simplex."""
        if not values.shape[-1]:
            return values
        rows = values.double()
        rows = rows - rows.amax(-1, keepdim=True)  # moves no projection, and no sum overflows
        ordered = rows.sort(-1, descending=True).values
        count = torch.arange(1, rows.shape[-1] + 1, dtype=rows.dtype, device=rows.device)
        shifts = (ordered.cumsum(-1) - 1) / count
        last = (ordered > shifts).sum(-1, keepdim=True) - 1
        return (rows - shifts.gather(-1, last)).clamp(min=0).to(values.dtype)


@dataclass(frozen=True)
class Reals(Range):
    """Numbers, within bounds where there are any."""

    low: float = -LARGEST
    high: float = LARGEST

    def words(self) -> str:
        low, high = self.low > -LARGEST, self.high < LARGEST
        if low and high:
            return f"numbers from {self.low:.4g} to {self.high:.4g}"
        if low or high:
            return (
                f"numbers, at least {self.low:.4g}" if low else f"numbers, at most {self.high:.4g}"
            )
        return "numbers"

    def holds(self, values: Tensor, known: Known) -> Tensor:
        return ((values >= self.low) & (values <= self.high)).all()

    def fault(self, values: Tensor, known: Known) -> str:
        wrong = values.min() if values.min() < self.low else values.max()
        return f"has {float(wrong):.6g}, must be {self.words()}"

    def nearest(self, values: Tensor) -> Tensor:
        return values.clamp(self.low, self.high)


@dataclass(frozen=True)
class LogProbabilities(Reals):
    """Rows of logarithms of probabilities, up to a constant each: only differences matter."""

    def words(self) -> str:
        return "logarithms of probabilities, up to a constant in each row"


@dataclass(frozen=True)
class Counts(Reals):
    """How often something was: whole or not, never negative."""

    low: float = 0.0

    def words(self) -> str:
        return "counts"


@dataclass(frozen=True)
class Whole(Reals):
    """Whole numbers: an index, say."""

    dtype = torch.int64

    def words(self) -> str:
        return super().words().replace("numbers", "whole numbers")

    def nearest(self, values: Tensor) -> Tensor:
        return values


@dataclass(frozen=True)
class SampleCount(Range):
    """The number of training samples that the client told on joining, and no other."""

    dtype = torch.int64

    def words(self) -> str:
        return "its number of training samples, as told on joining"

    def holds(self, values: Tensor, known: Known) -> Tensor:
        return (values == known.samples).all()

    def fault(self, values: Tensor, known: Known) -> str:
        return f"is {int(values)}, must be {known.samples}, as told on joining"


@dataclass(frozen=True)
class Free(Range):
    """Numbers of any type."""

    dtype = None

    def words(self) -> str:
        return "numbers of any type"


PROBABILITIES, COUNTS, REALS, FREE = Probabilities(), Counts(), Reals(), Free()
LOG_PROBABILITIES = LogProbabilities()
VARIANCES = Reals(low=0.0)


# Shapes.


@dataclass(frozen=True)
class AtMost:
    """A dimension of 1, 2, … or so many."""

    number: int


@dataclass(frozen=True)
class AsMany:
    """A dimension as large as the number of entries of this name that the client received."""

    name: str


Dimension = int | str | AtMost | AsMany
"""A string is a symbol of ``Known.sizes``: P, N or F."""


class Leaf(NamedTuple):
    """One array, as it must be."""

    shape: tuple[Dimension, ...]
    dtype: torch.dtype | None
    range: Range


class Entry(ABC):
    """What goes by one name in a message: one array, or several below it."""

    @abstractmethod
    def words(self) -> str:
        """For people: ``|P|×N probabilities``."""

    @abstractmethod
    def leaves(self, path: str, message: Message, known: Known) -> dict[str, Leaf]:
        """The arrays there must be; raises Refused where the message says itself that it is
        wrong."""


@dataclass(frozen=True)
class Array(Entry):
    shape: tuple[Dimension, ...]
    range: Range

    def words(self) -> str:
        shape = "×".join(map(dimension_words, self.shape))
        words = self.range.words()
        if not shape:
            return words.replace("whole numbers", "a whole number").replace("numbers", "a number")
        return f"{shape} {words}"

    def leaves(self, path: str, message: Message, known: Known) -> dict[str, Leaf]:
        dtype = self.range.dtype
        return {
            path: Leaf(
                self.shape,
                torch.get_default_dtype() if dtype == "floating" else dtype,
                self.range,
            )
        }


@dataclass(frozen=True)
class Model(Entry):
    """The weights of a model: parameters, and running statistics. ``base``: without its head."""

    network: str = ""
    """Of another network than the client's own, which the algorithm names."""
    part: Literal["all", "base"] = "all"

    def words(self) -> str:
        of = {"all": "", "base": "all but the head of "}[self.part]
        return f"weights of {of}{_network_words(self.network)}"

    def leaves(self, path: str, message: Message, known: Known) -> dict[str, Leaf]:
        model = known.model(self.network)
        if self.part == "base":
            model = base_of(known.head(self.network), model)
        return _as_they_are(flatten({"": model}), path)


@dataclass(frozen=True)
class PerParameter(Entry):
    """Something for each parameter of a model, of the same shape: itself, or its gradient."""

    part: Literal["all", "head", "base"] = "all"
    network: str = ""

    def words(self) -> str:
        of = {"all": "", "head": "the head of ", "base": "all but the head of "}[self.part]
        return f"a number for each parameter of {of}{_network_words(self.network)}"

    def leaves(self, path: str, message: Message, known: Known) -> dict[str, Leaf]:
        params = known.model(self.network).params
        if self.part != "all":
            head = head_tensors(known.head(self.network), params)
            inside = {f"{known.head(self.network)}.{name}" for name in head}
            base = {name: t for name, t in params.items() if name not in inside}
            params = head if self.part == "head" else base  # a head's names are those inside it
        return _as_they_are(flatten(params, "/"), path)


@dataclass(frozen=True)
class Numbered(Entry):
    """Several of one kind, by number: 0, 1, 2, …"""

    entry: Entry
    number: int | AtMost

    def words(self) -> str:
        return f"{dimension_words(self.number)} × {self.entry.words()}"

    def leaves(self, path: str, message: Message, known: Known) -> dict[str, Leaf]:
        found = numbered_below(path, message)
        most = self.number if isinstance(self.number, int) else self.number.number
        if found > most or (found < most and isinstance(self.number, int)):
            must = dimension_words(self.number)
            raise Refused(f"{path}: there are {found}, must be {must}")
        leaves: dict[str, Leaf] = {}
        for number in range(found):
            leaves |= self.entry.leaves(f"{path}/{number}", message, known)
        return leaves


@dataclass(frozen=True)
class Maybe(Entry):
    """What a message may lack: before the first merge a server may have nothing to send. All that
    may be missing is missing together."""

    entry: Entry

    def words(self) -> str:
        return f"{self.entry.words()}, or nothing"

    def leaves(self, path: str, message: Message, known: Known) -> dict[str, Leaf]:
        there = any(name == path or name.startswith(f"{path}/") for name in message.arrays)
        return self.entry.leaves(path, message, known) if there else {}


SAMPLES = Array((), SampleCount())


@dataclass(frozen=True)
class Messages:
    """The messages of an algorithm, each by its entries. ``{}`` is a message with nothing in it;
    None says that nothing is declared: then numbers must be finite, and that is all."""

    up: Entries | None = None
    """What a client sends, in the opening too."""
    down: Entries | None = None
    """What a selected client is sent."""
    evaluation: Entries | None = None
    """What a client is sent to have its models evaluated."""


def array_of(path: str, declared: Entries | None) -> Array | None:
    """What is declared of an array, by its flat name; nothing, if it is part of a model."""
    for name, entry in (declared or {}).items():
        while isinstance(entry, Numbered | Maybe):
            entry = entry.entry
        inside = path == escaped(name) or path.startswith(f"{escaped(name)}/")
        if inside and isinstance(entry, Array):
            return entry
    return None


def networks(declared: Entries | None) -> set[str]:
    """Of which networks the shapes must be known; the client's own is called ``""``."""
    return {entry.network for entry in _of_networks(declared)}


def sends_own_weights(messages: Messages) -> bool:
    """Whether clients send weights of their own network, or all but its head: clients with another
    network can do nothing with them."""
    return any(
        not entry.network and getattr(entry, "part", "all") != "head"
        for entry in _of_networks(messages.up)
    )


def shares_heads(messages: Messages) -> bool:
    """Whether clients are sent a head of their own network, made for all of them."""
    return any(
        not entry.network and getattr(entry, "part", "all") == "head"
        for entry in _of_networks(messages.down)
    )


def _of_networks(declared: Entries | None) -> Iterator[Model | PerParameter]:
    for entry in (declared or {}).values():
        while isinstance(entry, Numbered | Maybe):
            entry = entry.entry
        if isinstance(entry, Model | PerParameter):
            yield entry


def lines(messages: Messages) -> list[str]:
    """For people, a line for each entry."""
    ways = {
        "client → server": messages.up,
        "server → client": messages.down,
        "server → client, to evaluate": messages.evaluation,
    }
    if all(entries is None for entries in ways.values()):
        return ["messages: nothing is declared; any finite numbers are admitted"]
    return [line for way, entries in ways.items() for line in _way_lines(way, entries)]


def _way_lines(way: str, entries: Entries | None) -> Iterator[str]:
    if entries is None:
        yield f"{way}: not declared"
    elif not entries:
        yield f"{way}: nothing"
    else:
        yield from (f"{way}: {name}, {entry.words()}" for name, entry in entries.items())


def _as_they_are(tensors: Mapping[str, Tensor], path: str) -> dict[str, Leaf]:
    return {
        path + name: Leaf(tuple(t.shape), t.dtype, _range_of(name, t))
        for name, t in tensors.items()
    }


def _range_of(name: str, tensor: Tensor) -> Range:
    """Of a model's tensor; a variance is not negative."""
    if not tensor.is_floating_point():
        return FREE
    return VARIANCES if name.endswith("running_var") else REALS


def numbered_below(path: str, message: Message) -> int:
    """How many different names there are below ``path``."""
    depth = path.count("/") + 1
    inside = (name for name in message.arrays if name.startswith(f"{path}/"))
    return len({name.split("/")[depth] for name in inside})


def dimension_words(dimension: Dimension) -> str:
    if isinstance(dimension, AtMost):
        return f"at most {dimension.number}"
    if isinstance(dimension, AsMany):
        return f"as many as {dimension.name}"
    return "|P|" if dimension == "P" else str(dimension)


def _network_words(network: str) -> str:
    return f"'{network}'" if network else "the client's network"
