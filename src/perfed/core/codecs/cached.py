"""Only some of what is said of public samples: both ends remember the rest.

A row is what is said of one public sample. Both ends keep all rows as they are at the receiver. A
message brings the rows that the server asks for in this round, and of them only those that have
changed. The others stay as they were: *last known* is what a missing row means to whoever merges.

Probabilities in few bits are written in terms of the rows that both ends know (:mod:`.levels`):
what has not changed then takes next to nothing, and what has changed little takes little.

Which rows are asked for follows from the experiment's seed, the client and the number of the
message, so both ends know it and nothing is sent: all rows, in an order drawn once for a client,
come in turn.

**Both ends agree, also after a lost answer.** Where the server admits no answer, it remembers
neither the rows that came with it nor those it had sent before. Every message says on which one it
builds, and the server's also how many answers it has. A client keeps the last two versions of
either direction, so it can go back by one. Where an end still lacks what a message builds on, it
refuses the message; after ``age`` rounds all rows are sent again, and it can go on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perfed.core.admission import most_bytes
from perfed.core.codecs.bits import bytes_for, packed, unpacked
from perfed.core.codecs.levels import MOST_UNITS, as_code, as_levels, read, written
from perfed.core.codecs.probabilities import classes_in
from perfed.core.declaration import LogProbabilities, Probabilities, array_of
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.streams import numpy_stream
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage, stages

WHICH = "|which"
TERMS = "|terms"
FORM = "|form"
NUMBERS = "|numbers"
KINDS = (WHICH, TERMS, FORM, NUMBERS)
MOST = 2**30  # messages of a client
Rows = dict[str, Tensor]


class Versions(NamedTuple):
    """What an end remembers of one direction."""

    number: int
    """How many messages there were."""
    rows: Rows
    """After all of them."""
    before: Rows
    """After all but the last; a client keeps it, since its last answer may be lost."""
    whole: int
    """The round in which all rows were sent."""

    @classmethod
    def of(cls, state: Tree) -> Versions:
        if not state:
            return cls(0, {}, {}, 0)
        rows, before = state.get("rows", {}), state.get("before", {})
        return cls(int(state["number"]), rows, before, int(state["whole"]))

    def after(self, number: int) -> Rows | None:
        """The rows after so many messages, if they are still here."""
        if not number:
            return None
        return {self.number: self.rows, self.number - 1: self.before}.get(number) or None

    def state(self) -> Tree:
        return {
            "number": torch.tensor(self.number),
            "rows": self.rows,
            "before": self.before,
            "whole": torch.tensor(self.whole),
        }


@stages.register("cached")
@dataclass(frozen=True)
class Cached(Stage):
    """Of outputs on public samples, sends only those that the server asks for in a round and that
    have changed. Both ends keep the last of the others, and agree also after a lost answer."""

    share: float = option(
        1.0, "public samples of which a client is asked in a round, of all, in turn", gt=0, le=1
    )
    down_share: float = option(
        1.0, "public samples of which a client is told in a round, of all, in turn", gt=0, le=1
    )
    threshold: float = option(
        0.0,
        "a change of a number that is too small to be sent; of what is coded in bits before, all "
        "changes are sent",
        ge=0,
    )
    age: int = option(50, "rounds after which all is sent again; 0: never", ge=0)

    directions = ("up", "down")
    exact = False
    codes = True

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        known = Versions.of(state)
        number = self._has_other_end(known, at)
        base = known.after(number)
        old = bool(self.age) and at.round - known.whole >= self.age
        arrays, rows, is_whole = dict(message.arrays), {}, True
        for path in _rows_of(message, at):
            values, last = arrays.pop(path), (base or {}).get(path)
            classes = _classes_of(path, at)
            if last is None or old or last.shape != values.shape or last.dtype != values.dtype:
                said, rows[path] = _whole(values, classes), values
            else:
                asked = self._asked(values.numel() // values.shape[-1], number, at)
                last = last.to(values.device)
                said, rows[path] = self._part(values, last, asked.to(values.device), classes)
                is_whole = False
            arrays |= {path + kind: part for kind, part in said.items()}
        heard = Versions.of(at.other).number if at.direction != "up" else 0
        arrays[NUMBERS] = torch.tensor([number, heard], dtype=torch.int32)
        kept = base or {} if at.direction == "up" else {}
        whole = at.round if is_whole else known.whole
        return Message.from_arrays(arrays), Versions(number + 1, rows, kept, whole).state()

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        known, (number, heard) = Versions.of(state), _numbers(message)
        base = known.after(number)
        arrays = {p: t for p, t in message.arrays.items() if not p.endswith(KINDS)}
        room = most_bytes(at.declared, at.known)
        for path, said in message.arrays.items():
            name = path.removesuffix(WHICH).removesuffix(TERMS)
            if path.endswith(TERMS) and name + FORM in message.arrays:
                form = _form(message.arrays[name + FORM], _classes_of(name, at))
                room -= form.size
                if room < 0:  # whatever a message says of itself, and in however many arrays
                    raise Refused(f"{form.shape}: all rows are more than there can be")
                arrays[name] = _read_whole(said, form)
            elif path.endswith((TERMS, WHICH)):
                if base is None or name not in base:
                    raise Refused(f"builds on message {number} of this client, which is not here")
                last = base[name].to(said.device)
                asked = self._asked(last.numel() // last.shape[-1], number, at).to(said.device)
                if path.endswith(TERMS):
                    arrays[name] = _read_part(said, last, asked, _classes_of(name, at))
                else:
                    arrays[name] = _completed(arrays[name], said, last, asked)
        rows = {path: arrays[path] for path in _rows_of(Message.from_arrays(arrays), at)}
        kept = base or {} if at.direction == "down" else {}
        now = Versions(number + 1, rows, kept, at.round).state()
        if at.direction == "down":
            now |= {"heard": torch.tensor(heard), "round": torch.tensor(at.round)}
        return Message.from_arrays(arrays), now

    def _part(
        self, values: Tensor, last: Tensor, asked: Tensor, classes: int
    ) -> tuple[dict[str, Tensor], Tensor]:
        """What is sent of the rows that are asked for, and all rows as they then are there."""
        flat = values.reshape(-1, values.shape[-1])
        levels, before = as_levels(values, classes), as_levels(last, classes)
        if levels is not None and before is not None and levels[0].sum() == before[0].sum():
            terms = _as_tensor(written(levels[asked], before[asked]), values)
            return {TERMS: terms}, _replaced(last, asked, flat[asked])
        change = flat[asked].double() - last.reshape(flat.shape)[asked].double()
        limit = self.threshold if values.is_floating_point() else 0.0
        which = (change.abs() > limit).any(1)
        rows = _replaced(last, asked[which], flat[asked][which])
        return {"": flat[asked][which], WHICH: packed(which, 1)}, rows

    def _has_other_end(self, known: Versions, at: At) -> int:
        """How many messages the other end has. The server's own memory has only what was answered;
        a client is told, where the server has sent it something in this round."""
        told = at.direction == "up" and "heard" in at.other and int(at.other["round"]) == at.round
        return int(at.other["heard"]) if told else known.number

    def _asked(self, rows: int, number: int, at: At) -> Tensor:
        """Which rows the server asks for, or tells of, in this message."""
        share = self.share if at.direction == "up" else self.down_share
        if share == 1:
            return torch.arange(rows)
        purpose = f"wire/{at.direction}/{at.stage}/rows"
        order = torch.from_numpy(numpy_stream(at.seed, purpose, at.client).permutation(rows))
        count = math.ceil(share * rows)
        return order[(number * count + torch.arange(count)) % rows].sort().values


def _whole(values: Tensor, classes: int) -> dict[str, Tensor]:
    levels = as_levels(values, classes)
    if levels is None:
        return {"": values}
    form = torch.tensor([int(levels[0].sum()), *values.shape], dtype=torch.int32)
    return {TERMS: _as_tensor(written(levels, torch.zeros_like(levels)), values), FORM: form}


class Form(NamedTuple):
    """How rows look that do not build on others."""

    units: int
    shape: list[int]
    classes: int

    @property
    def size(self) -> int:
        """Bytes of all rows, once every class has its number."""
        return math.prod(self.shape[:-1]) * self.classes * torch.get_default_dtype().itemsize


def _form(form: Tensor, classes: int) -> Form:
    if form.dtype != torch.int32 or form.ndim != 1 or not 2 < len(form) < 8:
        raise Refused("must say how many units a row has, and its shape")
    units, *shape = form.tolist()
    columns = shape[-1]
    if min(shape) < 1 or columns > classes:
        raise Refused(f"{shape}: no rows, or more than {classes} classes")
    if not 0 < units <= MOST_UNITS or (columns < classes and units != columns):
        raise Refused(f"{units} units in {columns} columns")
    return Form(units, shape, classes)


def _read_whole(terms: Tensor, form: Form) -> Tensor:
    nothing = torch.zeros(math.prod(form.shape[:-1]), form.classes, dtype=torch.long)
    levels = read(_as_bytes(terms), nothing, form.units)
    return as_code(levels, form.shape[-1]).view(form.shape).to(terms.device)


def _read_part(terms: Tensor, last: Tensor, asked: Tensor, classes: int) -> Tensor:
    before = as_levels(last, classes)
    if before is None:
        raise Refused("builds on rows that are no probabilities in few bits")
    levels = read(_as_bytes(terms), before[asked], int(before[0].sum()))
    return _replaced(last, asked, as_code(levels, last.shape[-1]).to(last.device))


def _completed(values: Tensor, marks: Tensor, last: Tensor, asked: Tensor) -> Tensor:
    width = last.shape[-1]
    if marks.dtype != torch.uint8 or marks.shape != (bytes_for(len(asked), 1),):
        raise Refused(f"must say of {len(asked)} rows which are there")
    which = unpacked(marks, 1, len(asked)).bool()
    if values.shape != (int(which.sum()), width) or values.dtype != last.dtype:
        raise Refused(
            f"{tuple(values.shape)} {values.dtype}: must be {int(which.sum())} rows of {width}"
        )
    return _replaced(last, asked[which], values)


def _as_tensor(data: bytes, like: Tensor) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8, device=like.device)


def _as_bytes(data: Tensor) -> bytes:
    if data.dtype != torch.uint8 or data.ndim != 1:
        raise Refused(f"{tuple(data.shape)} {data.dtype}: must be bytes")
    return data.cpu().numpy().tobytes()


def _classes_of(path: str, at: At) -> int:
    """Of an array with rows of probabilities, or of their logarithms; 0 of any other."""
    entry = array_of(path, at.declared)
    likely = entry is not None and isinstance(entry.range, Probabilities | LogProbabilities)
    return classes_in(entry, at) if entry is not None and likely and at.known else 0


def _rows_of(message: Message, at: At) -> list[str]:
    """The arrays with a row for each public sample."""
    found = {path: array_of(path, at.declared) for path in message.arrays}
    return [
        path
        for path, entry in found.items()
        if entry is not None and "P" in entry.shape[:-1] and message.arrays[path].ndim > 1
    ]


def _replaced(rows: Tensor, where: Tensor, values: Tensor) -> Tensor:
    found = rows.clone()
    found.view(-1, rows.shape[-1])[where] = values
    return found


def _numbers(message: Message) -> tuple[int, int]:
    numbers = message.arrays.get(NUMBERS)
    if numbers is None or numbers.shape != (2,) or numbers.dtype != torch.int32:
        raise Refused("must say on which message it builds")
    number, heard = numbers.tolist()
    if not (0 <= number < MOST and 0 <= heard < MOST):
        raise Refused(f"message {number}: must be from 0 to {MOST}")
    return number, heard
