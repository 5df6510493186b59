"""The data of a whole experiment: each client's training, validation and test part, and the
public set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal, overload

import numpy as np

from perfed.core.errors import ConfigError
from perfed.core.inputs import Inputs
from perfed.core.notices import say_once
from perfed.core.schema import Options, option
from perfed.core.streams import numpy_stream
from perfed.data.datasets import ClientData, Dataset, Samples, taken, with_spare
from perfed.data.partition import Given, Held, Partition, move_to_minimum
from perfed.data.shift import Shift, ShiftedData, Shifting
from perfed.data.tokens import all_tokens, tokens_in

FreshMix = Literal["test", "held"]
SMALLEST_CLIENT = 3  # one sample each to train, to validate and to test
# The facts of a partition that are of each client.
OF_EACH_CLIENT = {
    "sizes": int,
    "client_names": str,
    "groups": int,
    "repaired": bool,
    "hostile": bool,
}
SPLITS_IN_MEMORY = 4096  # of the clients asked for last


@dataclass(frozen=True)
class Split(Options):
    """How a client divides its samples. What the shares leave over is not used.

    The defaults are the paper's: {0.1, 0.3, 0.4} / 0.1 / 0.5, the first drawn for each client.
    """

    train: tuple[float, ...] = option(
        (0.1, 0.3, 0.4),
        "share of samples to train on; with several, one is drawn for each client",
        gt=0,
        lt=1,
    )
    validation: float = option(
        0.1, "share of samples for choices such as the best round", gt=0, lt=1
    )
    test: float = option(
        0.5, "share of samples for the reported results, used for nothing else", gt=0, lt=1
    )

    second_validation: bool = option(
        False,
        "keep half of each client's validation samples from the algorithm, and choose rounds and "
        "settings by these alone; for algorithms that use validation samples themselves",
    )

    def validate(self) -> None:
        if not self.train:
            raise ConfigError("at least one share is needed", "train")
        if max(self.train) + self.validation + self.test > 1 + 1e-9:
            raise ConfigError(
                f"{max(self.train)} + {self.validation} + {self.test} is more than the whole"
            )


@dataclass(frozen=True)
class ClientSplit:
    """Positions in the federation's samples."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    unused: np.ndarray


class Splits(Sequence[ClientSplit]):
    """Every client's split, made when it is asked for: it follows from the seed and the client.
    What stays in memory grows with the samples' positions, not with objects for each client."""

    def __init__(
        self, held: Callable[[int], np.ndarray], sizes: np.ndarray, split: Split, seed: int
    ) -> None:
        """``held`` gives the positions of a client's samples, ``sizes`` how many each has."""
        self._held = held
        self._sizes = sizes
        self._split = split
        self._seed = seed
        self._made: dict[int, ClientSplit] = {}

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, client: int) -> ClientSplit: ...
    @overload
    def __getitem__(self, client: slice) -> list[ClientSplit]: ...
    def __getitem__(self, client: int | slice) -> ClientSplit | list[ClientSplit]:
        if isinstance(client, slice):
            return [self[number] for number in range(*client.indices(len(self)))]
        if not -len(self) <= client < len(self):
            raise IndexError(client)
        client %= len(self)
        if client not in self._made:
            while len(self._made) >= SPLITS_IN_MEMORY:
                del self._made[next(iter(self._made))]
            held = self._held(client)
            self._made[client] = split_client(held, self._split, self._seed, client)
        return self._made[client]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_made": {}}

    def part_sizes(self) -> np.ndarray:
        """How many samples each client has in each part, (clients, 3)."""
        shares = self._split.train
        kind = self._sizes * len(shares)  # how much a client holds, and which share it draws
        if len(shares) > 1:
            streams = (numpy_stream(self._seed, "split", client) for client in range(len(self)))
            drawn = (random.integers(len(shares)) for random in streams)
            kind = kind + np.fromiter(drawn, dtype=np.int64)
        kinds, inverse = np.unique(kind, return_inverse=True)
        held_and_share = [divmod(int(one), len(shares)) for one in kinds]
        parts = [_part_sizes(self._split, shares[share], held) for held, share in held_and_share]
        return np.array(parts, dtype=np.int32)[inverse]


@dataclass(frozen=True)
class Federation:
    samples: Samples
    splits: Sequence[ClientSplit]
    partition_facts: dict[str, Any]
    distant: ClientData | None = None
    """Where clients' samples are, if they are not in ``samples``; splits then are positions in a
    client's own."""
    second_validation: bool = False
    """Whether algorithms see only one half of a client's validation samples, and are evaluated on
    the other."""

    def __post_init__(self) -> None:
        """One sample has no halves. (At a site, all clients but its own have none.)"""
        if self.second_validation and (few := np.flatnonzero(self._part_sizes[:, 1] == 1)).size:
            raise ConfigError(
                f"client {few[0]} has one validation sample, and two are needed: a larger "
                "split.validation or partition.minimum, or false",
                "split.second_validation",
            )

    @property
    def clients(self) -> int:
        return len(self.splits)

    def seen(self, client: int, part: str) -> np.ndarray:
        """The samples of a part that an algorithm may look at."""
        return self._halves(client, part)[0]

    def evaluated(self, client: int, part: str) -> np.ndarray:
        """The samples of a part that a client's models are evaluated on."""
        return self._halves(client, part)[1]

    def _halves(self, client: int, part: str) -> tuple[np.ndarray, np.ndarray]:
        whole: np.ndarray = getattr(self.splits[client], part)
        if part != "validation" or not self.second_validation:
            return whole, whole
        kept_from_it = len(whole) // 2  # they are in random order
        return whole[kept_from_it:], whole[:kept_from_it]

    @property
    def inputs(self) -> Inputs:
        """What one sample is."""
        return _inputs(self.samples)

    @property
    def groups(self) -> np.ndarray:
        """The group of each client, where there is a shift; else all are in group 0. Algorithms
        must not look at it: it is for judging them, and for an oracle to compare them with."""
        nobody_differs = np.zeros(self.clients, dtype=np.int64)
        return np.asarray(self.partition_facts.get("groups", nobody_differs))

    @cached_property
    def _part_sizes(self) -> np.ndarray:
        if isinstance(self.splits, Splits):
            return self.splits.part_sizes()
        parts = [(len(s.train), len(s.validation), len(s.test)) for s in self.splits]
        return np.array(parts).reshape(-1, 3)

    @property
    def train_sizes(self) -> np.ndarray:
        return self._part_sizes[:, 0]

    @property
    def test_sizes(self) -> np.ndarray:
        return self._part_sizes[:, 2]

    def record(self, clients: Iterable[int] | None = None) -> dict[str, Any]:
        """What a run directory keeps: original sample numbers, by client and part, and how many
        of each label they are. Where only some ``clients`` are written down, of the others a
        checksum of who has how much."""
        everyone = range(self.clients)
        chosen = everyone if clients is None else list(clients)
        facts = self.partition_facts | {
            name: [plain(self.partition_facts[name][client]) for client in chosen]
            for name, plain in OF_EACH_CLIENT.items()
            if name in self.partition_facts
        }
        return {
            **({"data": self.samples.origin} if self.samples.origin else {}),
            **facts,
            **({} if clients is None else {"numbers": chosen, "everyone": self._checksum()}),
            "public": self.samples.public_index.tolist(),
            "clients": [self._client_record(client) for client in chosen],
        }

    def _client_record(self, client: int) -> dict[str, Any]:
        split, original, labels = self.splits[client], self.samples.index, self.samples.y
        if self.distant is not None:
            labels = self.distant.client(client)[1]
            original = np.arange(len(labels))
        counts = {
            part: np.bincount(labels[where], minlength=self.samples.classes).tolist()
            for part, where in vars(split).items()
        }
        parts = {part: original[where].tolist() for part, where in vars(split).items()}
        return parts | {"labels": counts}

    def _checksum(self) -> dict[str, Any]:
        content = np.ascontiguousarray(self._part_sizes).tobytes()
        return {"clients": self.clients, "sizes": blake2b(content, digest_size=16).hexdigest()}


def build_federation(
    dataset: Dataset,
    partition: Partition,
    split: Split,
    clients: int,
    seed: int,
    fresh_test: int = 0,
    fresh_mix: FreshMix = "test",
    shift: Shift | None = None,
    shared_test: bool = False,
) -> Federation:
    """Load, divide among clients, and divide each client's samples."""
    judged_by_others = "fresh_test" if fresh_test else "shared_test" if shared_test else ""
    distant = dataset.client_data(seed, clients)
    if distant is not None:
        return _distant_federation(distant, partition, split, seed, judged_by_others, shift)
    samples = _recognised(dataset.load(seed))
    if samples.classes < 2:
        names = samples.origin.get("classes", ["0"])
        raise ConfigError(
            f"all samples have one label, {names[0]}: there must be two or more", "data"
        )
    if clients * SMALLEST_CLIENT > len(samples.y):
        raise ConfigError(
            f"{clients} clients need at least {clients * SMALLEST_CLIENT} samples "
            f"({SMALLEST_CLIENT} each), there are {len(samples.y)}",
            "clients",
        )
    samples, holdings, facts = _dealt(samples, partition, clients, seed)
    splits: Sequence[ClientSplit] = Splits(holdings.of, holdings.sizes, split, seed)
    if judged_by_others and isinstance(partition, Given):
        raise ConfigError(
            "given clients may differ in more than labels: only they have samples like theirs",
            judged_by_others,
        )
    if fresh_test:
        samples, splits = freshly_tested(samples, splits, fresh_test, fresh_mix, seed)
    elif shared_test:
        samples, splits = jointly_tested(samples, splits, fresh_mix, seed)
    samples, scales = standardised(replace(samples, spare=None), splits)
    facts |= scales
    if shift is not None:
        shifting = Shifting.of(shift, len(splits), _inputs(samples), samples.classes, seed)
        samples, splits = shifted(samples, splits, holdings, shifting)
        facts["groups"] = shifting.groups
    return Federation(samples, splits, facts, second_validation=split.second_validation)


def _dealt(
    samples: Samples, partition: Partition, clients: int, seed: int
) -> tuple[Samples, Held, dict[str, Any]]:
    """The samples that some client holds, who holds which, and what a run records of it."""
    random = numpy_stream(seed, "partition")
    facts: dict[str, Any] = {}
    if isinstance(partition, Given):
        owner, facts["client_names"] = _given_owner(samples, clients)
    else:
        if samples.client_ids is not None:
            say_once(
                f"the data say whose each sample is; partition '{partition.registered_name}' deals "
                "them anew, 'given' leaves each where it is"
            )
        owner = partition.assign(samples.y, samples.classes, clients, random)
    minimum = partition.minimum_size()
    if partition.leaves_out_small():
        samples, owner, facts["left_out"] = _without_small(samples, owner, clients, minimum)
        clients -= facts["left_out"]["clients"]
    before = Held(owner, clients).sizes
    owner, dealt = move_to_minimum(owner, clients, minimum, random), owner
    holdings = Held(owner, clients)
    _check_smallest(holdings.sizes, facts.get("client_names"))
    facts |= {
        "minimum": minimum,
        "moved_to_minimum": int((owner != dealt).sum()),
        "sizes": holdings.sizes,
    }
    if minimum:
        facts["repaired"] = before < minimum
    return samples, holdings, facts


def _without_small(
    samples: Samples, owner: np.ndarray, clients: int, minimum: int
) -> tuple[Samples, np.ndarray, dict[str, int]]:
    """Clients with fewer than ``minimum`` samples are left out, and these with them; the others are
    numbered anew, in their order."""
    large = np.bincount(owner, minlength=clients) >= minimum
    if not large.any():
        raise ConfigError(
            f"none of {clients} clients has {minimum} samples: must be fewer", "partition.minimum"
        )
    kept = np.flatnonzero(large[owner])
    left_out = {"clients": int((~large).sum()), "samples": len(owner) - len(kept)}
    if left_out["clients"]:
        say_once(
            f"{left_out['clients']} of {clients} clients have fewer than {minimum} samples and are "
            f"left out, with {left_out['samples']} samples"
        )
    number = np.cumsum(large) - 1
    return taken(samples, kept), number[owner[kept]], left_out


def _inputs(samples: Samples) -> Inputs:
    return Inputs(tuple(samples.x.shape[1:]), samples.tokens)


def _recognised(samples: Samples) -> Samples:
    """A user's own dataset need not say that its samples are tokens."""
    if samples.tokens is not None:
        return samples
    parts = [part for part in (samples.x, samples.public_x) if len(part)]
    tokens = all_tokens([tokens_in(part, 0, "samples") for part in parts])
    return replace(samples, tokens=tokens)


def _check_smallest(sizes: np.ndarray, names: Sequence[str] | None) -> None:
    smallest = int(sizes.argmin())
    if sizes[smallest] < SMALLEST_CLIENT:
        name = names[smallest] if names else smallest
        raise ConfigError(
            f"client {name} has {sizes[smallest]} samples; each needs "
            f"{SMALLEST_CLIENT} (train, validation, test): fewer clients, or a larger minimum",
            "partition",
        )


def _distant_federation(
    distant: ClientData,
    partition: Partition,
    split: Split,
    seed: int,
    judged_by_others: str,
    shift: Shift | None,
) -> Federation:
    """Of clients whose samples are made or read when they are needed."""
    if not isinstance(partition, Given):
        raise ConfigError(
            f"these data say whose each sample is, and cannot be dealt anew as "
            f"'{partition.registered_name}' would: must be given",
            "partition",
        )
    if judged_by_others:
        raise ConfigError(
            "clients' samples are never together in memory: must not be set", judged_by_others
        )
    _check_smallest(distant.sizes, None)
    splits = Splits(distant.positions, distant.sizes, split, seed)
    facts = {"minimum": 0, "moved_to_minimum": 0, "sizes": distant.sizes}
    if shift is not None:
        samples, clients = distant.samples, len(distant.sizes)
        shifting = Shifting.of(shift, clients, _inputs(samples), samples.classes, seed)
        distant = ShiftedData(distant, shifting)
        facts["groups"] = shifting.groups
    return Federation(distant.samples, splits, facts, distant, split.second_validation)


def freshly_tested(
    samples: Samples, splits: Sequence[ClientSplit], count: int, mix: FreshMix, seed: int
) -> tuple[Samples, list[ClientSplit]]:
    """Instead of its own test samples, ``count`` that nobody holds, with the client's label mix.

    Clients share them: of a label, everybody has the first ones. What was a client's own to test
    is not used.
    """
    spare = samples.spare
    if spare is None:
        raise ConfigError(
            "every sample is some client's: set data.samples, where the dataset has that, to fewer "
            "than there are",
            "fresh_test",
        )
    wanted = np.array([_quota(_label_mix(samples, split, mix), count) for split in splits])
    most = wanted.max(axis=0)
    left = numpy_stream(seed, "fresh-test").permutation(spare.where)
    by_label = [left[spare.all.y[left] == label] for label in range(samples.classes)]
    for label, (there, needed) in enumerate(zip(by_label, most, strict=True)):
        if len(there) < needed:
            raise ConfigError(
                f"{needed} samples of label {label} are needed that no client holds, there are "
                f"{len(there)}: fewer, or fewer data.samples",
                "fresh_test",
            )
    used = [there[:needed] for there, needed in zip(by_label, most, strict=True)]
    return with_spare(samples, np.concatenate(used)), _tested_on(len(samples.y), wanted, splits)


def jointly_tested(
    samples: Samples, splits: Sequence[ClientSplit], mix: FreshMix, seed: int
) -> tuple[Samples, list[ClientSplit]]:
    """Every client on the test samples of all, which nobody trains on: as many as there are with
    the client's label mix. They are copies, for a shift changes them as it changes the client."""
    pool = numpy_stream(seed, "shared-test").permutation(
        np.concatenate([split.test for split in splits])
    )
    by_label = [pool[samples.y[pool] == label] for label in range(samples.classes)]
    there = np.array([len(of) for of in by_label])
    mixes = np.array([_label_mix(samples, split, mix) for split in splits])
    wanted = np.array([_largest_quota(shares, there) for shares in mixes])
    _tell_of_poor_judges(mixes, there, wanted.sum(1) < [len(split.test) for split in splits])
    used = [of[:needed] for of, needed in zip(by_label, wanted.max(axis=0), strict=True)]
    everything = np.concatenate([np.arange(len(samples.y)), *used])
    return taken(samples, everything), _tested_on(len(samples.y), wanted, splits)


def _tell_of_poor_judges(mixes: np.ndarray, there: np.ndarray, fewer: np.ndarray) -> None:
    missing = np.flatnonzero(mixes.any(axis=0) & (there == 0))
    if missing.size:
        some = ", ".join(map(str, missing[:5])) + (", …" if missing.size > 5 else "")
        say_once(
            f"no client has a test sample of label {some}: with shared_test nobody is evaluated on "
            "it, though some clients hold it"
        )
    if fewer.any():
        say_once(
            f"with shared_test {fewer.sum()} of {len(fewer)} clients are evaluated on fewer "
            "samples than their own test samples: one label is so rare that with their mix of "
            "labels there are no more"
        )


def _tested_on(end: int, wanted: np.ndarray, splits: Sequence[ClientSplit]) -> list[ClientSplit]:
    """Splits whose test samples begin at ``end``, label by label: of each, a client has the first
    that it wants. What was its own to test is not used."""
    most = wanted.max(axis=0)
    first = end + np.cumsum(most) - most
    return [
        replace(
            split,
            test=np.concatenate(
                [start + np.arange(n) for start, n in zip(first, own, strict=True)]
            ),
            unused=np.concatenate([split.unused, split.test]),
        )
        for split, own in zip(splits, wanted, strict=True)
    ]


def _label_mix(samples: Samples, split: ClientSplit, mix: FreshMix) -> np.ndarray:
    alike = split.test if mix == "test" else np.concatenate([*vars(split).values()])
    return np.bincount(samples.y[alike], minlength=samples.classes) / len(alike)


def _quota(shares: np.ndarray, count: int) -> np.ndarray:
    """How many of each label make ``count``; none is off by more than one."""
    return np.diff(np.round(np.cumsum(shares) * count), prepend=0).astype(int)


def _largest_quota(shares: np.ndarray, there: np.ndarray) -> np.ndarray:
    """The most samples with these shares, where of each label so many are there. On a label that
    is not there nobody can be evaluated."""
    shares = np.where(there > 0, shares, 0.0)
    shares = shares / shares.sum()
    asked = shares > 0
    count = int((there[asked] / shares[asked]).min()) + 1
    while (_quota(shares, count) > there).any():
        count -= 1
    return _quota(shares, count)


def shifted(
    samples: Samples, splits: Sequence[ClientSplit], holdings: Held, shifting: Shifting
) -> tuple[Samples, Sequence[ClientSplit]]:
    """Every client's samples as its group has them. Fresh samples, which clients share, are there
    once for each group."""
    fresh: dict[int, np.ndarray] = {}
    if len(samples.y) > holdings.sizes.sum():
        samples, splits, fresh = _fresh_of_each_group(samples, splits, shifting.groups)
    x, y = shifting.given(samples, samples.x), samples.y.copy()
    x = x.copy() if x is samples.x else x  # the dataset's own stay as they are
    for client in np.flatnonzero(shifting.groups).tolist():
        held = holdings.of(client)
        x[held], y[held] = shifting.client(client, x[held], y[held])
    for group, where in fresh.items():
        x[where], y[where] = shifting.fresh(group, x[where], y[where])
    return replace(samples, x=x, y=y, public_x=shifting.public(samples)), splits


def _fresh_of_each_group(
    samples: Samples, splits: Sequence[ClientSplit], groups: np.ndarray
) -> tuple[Samples, list[ClientSplit], dict[int, np.ndarray]]:
    """A copy of its test samples for each group but the first, and where it is."""
    splits, where, copies = list(splits), {}, [np.arange(len(samples.y))]
    end = len(samples.y)
    for group in range(1, int(groups.max()) + 1):
        members = np.flatnonzero(groups == group).tolist()
        wanted = np.unique(np.concatenate([splits[client].test for client in members]))
        for client in members:
            test = end + np.searchsorted(wanted, splits[client].test)
            splits[client] = replace(splits[client], test=test)
        where[group] = np.arange(end, end + len(wanted))
        copies.append(wanted)
        end += len(wanted)
    return taken(samples, np.concatenate(copies)), splits, where


def standardised(samples: Samples, splits: Sequence[ClientSplit]) -> tuple[Samples, dict[str, Any]]:
    """Features that ask for it with mean 0 and deviation 1 over all clients' *training* samples,
    and what was taken off and divided by. The public set is changed alike, and has no say."""
    if samples.unscaled is None:
        return samples, {}
    training = samples.x[np.concatenate([split.train for split in splits])]
    mean = np.where(samples.unscaled, training.mean(axis=0, dtype=np.float64), 0.0)
    deviation = np.where(samples.unscaled, training.std(axis=0, dtype=np.float64), 1.0)
    deviation[deviation == 0] = 1.0
    with np.errstate(over="ignore"):  # said in words
        x, public_x = (
            ((part - mean) / deviation).astype(np.float32) for part in (samples.x, samples.public_x)
        )
    _check_standardised(samples, x, public_x)
    facts = {"standardised": {"mean": mean.tolist(), "deviation": deviation.tolist()}}
    return replace(samples, x=x, public_x=public_x, unscaled=None), facts


def _check_standardised(samples: Samples, *parts: np.ndarray) -> None:
    """A value may be so far off all that train that it leaves float32."""
    for part in parts:
        wrong = np.flatnonzero(~np.isfinite(part).all(axis=0))
        if len(wrong):
            name = samples.origin.get("columns", {wrong[0]: wrong[0]})[wrong[0]]
            raise ConfigError(
                f"column '{name}' has a value too far off those that train: divided by their "
                "deviation it is too large for float32; list it under 'ignore', or mend it",
                "data.path",
            )


def _given_owner(samples: Samples, clients: int) -> tuple[np.ndarray, list[str]]:
    """The client of each sample, and the name of each client."""
    if samples.client_ids is None:
        raise ConfigError("the data names no clients", "partition")
    names, owner = np.unique(samples.client_ids, return_inverse=True)
    if len(names) != clients:
        raise ConfigError(f"the data names {len(names)} clients, not {clients}", "clients")
    return owner, [str(name) for name in names]


def split_client(held: np.ndarray, split: Split, seed: int, client: int) -> ClientSplit:
    """Divide one client's samples; even the smallest client has one in every part."""
    random = numpy_stream(seed, "split", client)
    share = split.train[random.integers(len(split.train))]
    sizes = _part_sizes(split, share, len(held))
    return ClientSplit(*np.split(random.permutation(held), np.cumsum(sizes)))


def _part_sizes(split: Split, share: float, held: int) -> list[int]:
    """Of the part to train on, to validate and to test, for a client that holds so many."""
    sizes = [max(1, round(part * held)) for part in (share, split.validation, split.test)]
    while sum(sizes) > held:  # rounding took too much
        sizes[sizes.index(max(sizes))] -= 1
    return sizes
