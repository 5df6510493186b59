"""Robust stages: what a few clients send cannot move what all get by much.

Each is a step over all admitted replies of a round, before the method merges them
(:mod:`perfed.core.wire`). Clients are compared within an architecture, and entry by entry: a model
is one vector, so are soft decisions. Whole numbers are left as they are, apart from the number of
samples.

* ``bounded``: no client is farther from the middle than a few times what is usual, and none counts
  for more samples. Numbers that have bounds by declaration, such as probabilities, have them
  already. For every method.
* ``history``: who was far from the middle in many rounds counts less and less, by past
  exponentials (Roux, Zimmer, Pokutta: *On the Byzantine-Resilience of Distillation-Based Federated
  Learning*, ICLR 2025). For every method.
* ``median``, ``trimmed``: the middle itself. For methods whose merge is a mean.

The middle is the median of each number. Of fewer than three clients there is none: they pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import softmax

from perfed.algorithms.perfed_kin import found_kinds, kinship
from perfed.algorithms.witnesses import Witnesses
from perfed.core.algorithm import Algorithm, Reply
from perfed.core.declaration import LARGEST, PROBABILITIES, SAMPLES, Array, Entries, Range, Reals
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree, escaped
from perfed.core.wire import Stage, Together, stages

FEWEST = 3  # clients, for a middle
LOUDEST = 2.0  # a round says no more for or against a client, nor do all rounds for it
FOREVER = 20.0  # what speaks against it in all rounds: nearly nothing is heard then
USUAL = 2.0  # times the median distance, nothing speaks against a client
COLUMNS = 1_000_000  # of a vector at once
STANDARD_ERRORS = 2.0  # of each half, more than in PerFed-Kin: who is put apart may not be heard
Vectors = dict[str, Tensor]
"""By an entry's name, a row for each client."""


@stages.register("bounded")
@dataclass(frozen=True)
class Bounded(Stage):
    """Limits how far from the middle a message may be, and for how many samples it counts."""

    reach: float = option(
        2.0, "how many times the median distance from the middle a client may be away", gt=0
    )
    samples: float = option(
        1.5, "how many times the median number of samples a client counts for, at most", ge=1
    )

    directions = ()

    def gather(
        self, replies: Sequence[Reply], at: Together, state: Tree
    ) -> tuple[list[Reply], Tree]:
        replies = list(self._counted(replies, at))
        result = {reply.client.id: reply for reply in replies}
        bounded = _bounded_entries(at.declared)
        for group in alike(replies):
            vectors = {n: rows for n, rows in vectors_of(group).items() if n not in bounded}
            moved = torch.zeros(len(group), dtype=torch.bool)
            for name, rows in vectors.items():
                middle, distance = distances(rows)
                limit = self.reach * distance.median()
                if limit > 0:  # else most say the same, and nothing is known of what is usual
                    share = limit / distance.clamp(min=limit)
                    vectors[name] = drawn(rows, middle, share)
                    moved |= (share < 1).cpu()
            result |= {r.client.id: r for r in with_vectors(group, vectors, moved)}
        return list(result.values()), state

    def _counted(self, replies: Sequence[Reply], at: Together) -> Iterator[Reply]:
        """Each for at most so many times the median number of samples."""
        sizes = torch.tensor([float(reply.client.samples) for reply in replies])
        weights = torch.tensor([reply.weight for reply in replies]).double()
        most, heaviest = (self.samples * float(few.median()) for few in (sizes, weights))
        for reply in replies:
            few = reply.client.samples <= most
            yield reply if few else _counting(reply, most, min(reply.weight, heaviest), at)


@stages.register("history")
@dataclass(frozen=True)
class History(Stage):
    """A client that fits nobody, or is too far from the middle, counts less from round to round.

    A client's share is e to the power of what speaks for it, in all rounds together, and 1 at most.
    Where clients send outputs on public samples, a round speaks for a client as PerFed-Kin does:
    by the likelihood that it is kin of the others, against that of a stranger. Elsewhere only
    distance speaks, and only against: by how much it was more than twice the median one.

    What is left of a message goes to the middle: the mean of what is heard of the others, or the
    median of each number. Who is not heard at all then says what the others say, for one sample.

    Liars who agree are a small group, and nothing in a round tells them from an honest one. Such a
    group keeps what it says of public samples, and a method such as PerFed-Kin gives it a table of
    its own. But in some rounds the group is not found, and its members are heard with all others.
    With ``largest_only`` being of a small group speaks against a client's number of samples and
    what it claims, as long as it is not found among the largest again: then liars weigh next to
    nothing in those rounds. So does an honest minority, which is found less often then.
    """

    rate: float = option(1.0, "how much each round counts", gt=0)
    largest_only: bool = option(
        False, "whether who is outside of the largest group counts for one sample only"
    )

    directions = ()

    def gather(
        self, replies: Sequence[Reply], at: Together, state: Tree
    ) -> tuple[Sequence[Reply], Tree]:
        if at.round < 0:  # untrained networks agree on nothing
            return replies, state
        outputs = _outputs(at.declared)
        if outputs is None:
            return self._by_distance(replies, state)
        return self._by_kinship(replies, outputs, at, state)

    def _by_kinship(
        self, replies: Sequence[Reply], outputs: str, at: Together, state: Tree
    ) -> tuple[Sequence[Reply], Tree]:
        now = {str(reply.client.id): _witness(reply, outputs) for reply in replies}
        bank = {**state.get("bank", {}), **now}
        said, kind = heard(bank)
        size = kind.bincount()
        speaks, apart = odds(said, kind), size[kind] < size.max()  # of two as large, neither is
        joins = torch.where(apart, -LOUDEST, speaks)
        # Of a small group nobody vouches for anybody: liars who agree would. In a mean of all,
        # another kind has no place.
        speaks[apart] = -LOUDEST if at.takes_mean else speaks[apart].clamp(max=0)
        trust = self._added(state.get("trust", {}), speaks, bank, now)
        share = {reply.client.id: _share(trust, reply) for reply in replies}
        kept, count = {"bank": bank, "trust": trust}, share
        if self.largest_only and not at.takes_mean:
            company = self._added(state.get("company", {}), joins, bank, now)
            count = {r.client.id: min(share[r.client.id], _share(company, r)) for r in replies}
            kept["company"] = company
        result = {reply.client.id: reply for reply in replies}
        # Who is not trusted is not believed a large number of samples either.
        usual = float(torch.tensor([float(r.client.samples) for r in replies]).median())
        for group in alike(replies, fewest=1):
            vectors, moved = vectors_of(group), torch.zeros(len(group), dtype=torch.bool)
            for name, rows in vectors.items():
                of = share if name == outputs else count
                few = torch.tensor([of[reply.client.id] for reply in group], dtype=torch.double)
                weights = few.to(rows)[:, None]
                middle = (weights * rows).sum(0) / weights.sum().clamp(min=1e-30)
                vectors[name] = drawn(rows, middle, few)
                moved |= few < 1
            for reply in with_vectors(group, vectors, moved):
                heard_for = count[reply.client.id]
                if heard_for < 1:
                    samples = min(usual, reply.client.samples) * heard_for
                    reply = _counting(reply, samples, reply.weight * heard_for, at)
                result[reply.client.id] = reply
        return list(result.values()), kept

    def _added(
        self,
        before: Tree,
        speaks: Tensor,
        bank: Mapping[str, object],
        now: Mapping[str, object],
    ) -> dict[str, Tensor]:
        """What speaks for each client in all rounds, with this one for those who are there."""
        after = dict(before)
        for name, change in zip(bank, speaks.clamp(-LOUDEST, LOUDEST), strict=True):
            if name in now:
                last = after.get(name, torch.zeros(())).cpu()
                after[name] = (last + self.rate * change).clamp(-FOREVER, 0).float()
        return after

    def _by_distance(self, replies: Sequence[Reply], state: Tree) -> tuple[Sequence[Reply], Tree]:
        result = {reply.client.id: reply for reply in replies}
        trust = dict(state.get("trust", {}))
        for group in alike(replies):
            vectors = vectors_of(group)
            middles, excess = {}, torch.zeros(len(group), dtype=torch.double)
            for name, rows in vectors.items():
                middles[name], distance = distances(rows)
                usual = distance.median().clamp(min=1e-30)
                excess = torch.maximum(excess, (distance / usual - USUAL).clamp(min=0).cpu())
            for reply, more in zip(group, excess.tolist(), strict=True):
                before = float(trust.get(str(reply.client.id), 0.0))
                trust[str(reply.client.id)] = torch.tensor(max(-FOREVER, before - self.rate * more))
            share = torch.stack([trust[str(reply.client.id)].exp() for reply in group])
            vectors = {name: drawn(rows, middles[name], share) for name, rows in vectors.items()}
            result |= {r.client.id: r for r in with_vectors(group, vectors, share < 1)}
        return list(result.values()), {"trust": trust}


@dataclass(frozen=True)
class Middle(Stage):
    """In the place of each message comes the middle of all, so that their mean is the middle."""

    directions = ()

    def check(self, algorithm: Algorithm) -> None:
        if not algorithm.merges_by_mean:
            raise ConfigError(
                f"the server of '{algorithm.registered_name}' takes no mean of messages: must be "
                "'bounded' or 'history'"
            )

    def middle(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(
        self, replies: Sequence[Reply], at: Together, state: Tree
    ) -> tuple[list[Reply], Tree]:
        result = {reply.client.id: reply for reply in replies}
        for group in alike(replies):
            vectors = {
                name: self.middle(rows).expand_as(rows) for name, rows in vectors_of(group).items()
            }
            everyone = torch.ones(len(group), dtype=torch.bool)
            result |= {r.client.id: r for r in with_vectors(group, vectors, everyone)}
        return list(result.values()), state


@stages.register("median")
@dataclass(frozen=True)
class Median(Middle):
    """The median over clients of each number, instead of the mean."""

    def middle(self, rows: Tensor) -> Tensor:
        return middle_of(rows)


@stages.register("trimmed")
@dataclass(frozen=True)
class Trimmed(Middle):
    """The mean over clients of each number, without the largest and the smallest."""

    share: float = option(0.3, "share of the clients that is left out at either end", ge=0, lt=0.5)

    def middle(self, rows: Tensor) -> Tensor:
        cut = int(self.share * len(rows))
        return rows.sort(0).values[cut : len(rows) - cut].mean(0)


def alike(replies: Sequence[Reply], fewest: int = FEWEST) -> Iterator[list[Reply]]:
    """Replies whose floating arrays can be compared, where there are enough of them. Weights are of
    one architecture; anything else clients with different networks say alike."""
    groups: dict[object, list[Reply]] = {}
    for reply in replies:
        shapes = tuple((path, tuple(t.shape)) for path, t in _floating(reply.message).items())
        weights = any("/" in path for path, _ in shapes)
        key = (reply.client.architecture if weights else "", shapes)
        groups.setdefault(key, []).append(reply)
    yield from (group for group in groups.values() if len(group) >= fewest)


def vectors_of(replies: Sequence[Reply]) -> Vectors:
    names = dict.fromkeys(path.partition("/")[0] for path in _floating(replies[0].message))
    return {
        name: torch.stack([_vector(reply.message, name) for reply in replies]) for name in names
    }


def with_vectors(
    replies: Sequence[Reply], vectors: Mapping[str, Tensor], moved: Tensor
) -> Iterator[Reply]:
    """Those that have moved say what the vectors say; the others are as they are."""
    for number, reply in enumerate(replies):
        if not moved[number]:
            yield reply
            continue
        arrays = dict(reply.message.arrays)
        for name, rows in vectors.items():
            inside = [path for path in _floating(reply.message) if path.partition("/")[0] == name]
            parts = torch.split(rows[number], [arrays[path].numel() for path in inside])
            for path, part in zip(inside, parts, strict=True):
                arrays[path] = part.reshape(arrays[path].shape).to(arrays[path])
        yield replace(reply, message=Message.from_arrays(arrays))


def middle_of(rows: Tensor) -> Tensor:
    """The median of each column, between the two in the middle where their number is even."""
    place = (len(rows) - 1) // 2, len(rows) // 2
    parts = [part.sort(0).values for part in torch.split(rows, COLUMNS, dim=1)]  # for memory
    return torch.cat([(part[place[0]] + part[place[1]]) / 2 for part in parts])


def distances(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The middle of some vectors, and how far each is from it."""
    middle = middle_of(rows)
    return middle, torch.linalg.vector_norm(rows - middle, dim=1, dtype=torch.double)


def drawn(rows: Tensor, middle: Tensor, share: Tensor) -> Tensor:
    """Each vector as much nearer to the middle as its share is below 1."""
    share = share.to(rows)[:, None]
    return torch.where(share < 1, middle + share * (rows - middle), rows)


def _share(speaks: Mapping[str, Tensor], reply: Reply) -> float:
    """How much of a client is heard, by what speaks for it."""
    return math.exp(float(speaks[str(reply.client.id)]))


def heard(bank: Mapping[str, Mapping[str, Tensor]]) -> tuple[Witnesses, Tensor]:
    """What everybody said last, and of which kind each is."""
    decisions = torch.stack([one["said"].cpu() for one in bank.values()])
    samples = torch.stack([one["samples"].cpu() for one in bank.values()])
    said = Witnesses.hear(decisions, samples.clamp(max=float(samples.median())))
    return said, found_kinds(said, STANDARD_ERRORS, min)


def odds(said: Witnesses, kind: Tensor) -> Tensor:
    """What speaks for each client: the logarithm of how much likelier its fit is for kin of its
    group than for a stranger."""
    kin = kinship(said, kind).clamp(1e-12, 1 - 1e-12)
    others = (kind.bincount()[kind] - 1).clamp(min=1)
    return (kin / (1 - kin)).log() - others.log()


def _bounded_entries(declared: Entries | None) -> set[str]:
    return {
        escaped(name)
        for name, entry in (declared or {}).items()
        if isinstance(entry, Array) and _has_bounds(entry.range)
    }


def _has_bounds(range: Range) -> bool:
    return not isinstance(range, Reals) or (range.low > -LARGEST and range.high < LARGEST)


def _outputs(declared: Entries | None) -> str | None:
    """The name of the entry that holds outputs on public samples."""
    for name, entry in (declared or {}).items():
        if isinstance(entry, Array) and entry.shape == ("P", "N"):
            return name
    return None


def _witness(reply: Reply, outputs: str) -> dict[str, Tensor]:
    said: Tensor = reply.message[outputs]
    likely = bool(PROBABILITIES.holds(said, None))  # type: ignore[arg-type]
    return {
        "said": said if likely else softmax(said, -1),
        "samples": torch.tensor(float(reply.client.samples)),
    }


def _counting(reply: Reply, samples: float, weight: float, at: Together) -> Reply:
    """As if from a client with so many samples, one at least."""
    number = max(1, round(samples))
    told = {escaped(name) for name, entry in (at.declared or {}).items() if entry == SAMPLES}
    arrays = {
        path: torch.full_like(t, number) if path in told else t
        for path, t in reply.message.arrays.items()
    }
    client = replace(reply.client, samples=number)
    return Reply(client, Message.from_arrays(arrays), weight)


def _floating(message: Message) -> dict[str, Tensor]:
    return {path: t for path, t in message.arrays.items() if t.is_floating_point()}


def _vector(message: Message, name: str) -> Tensor:
    inside = [t for path, t in _floating(message).items() if path.partition("/")[0] == name]
    return torch.cat([tensor.reshape(-1) for tensor in inside])
