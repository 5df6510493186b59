"""The data of a whole experiment: each client's training, validation and test part, and the
public set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from perfed.core.errors import ConfigError
from perfed.core.inputs import Inputs
from perfed.core.notices import say_once
from perfed.core.schema import Options, option
from perfed.core.streams import numpy_stream
from perfed.data.datasets import Dataset, Samples, with_spare
from perfed.data.partition import Given, Partition, held_by, move_to_minimum
from perfed.data.tokens import all_tokens, tokens_in

FreshMix = Literal["test", "held"]
SMALLEST_CLIENT = 3  # one sample each to train, to validate and to test


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


@dataclass(frozen=True)
class Federation:
    samples: Samples
    splits: Sequence[ClientSplit]
    partition_facts: dict[str, Any]

    @property
    def clients(self) -> int:
        return len(self.splits)

    @property
    def inputs(self) -> Inputs:
        """What one sample is."""
        return Inputs(tuple(self.samples.x.shape[1:]), self.samples.tokens)

    @cached_property
    def train_sizes(self) -> np.ndarray:
        return np.array([len(split.train) for split in self.splits])

    @cached_property
    def test_sizes(self) -> np.ndarray:
        return np.array([len(split.test) for split in self.splits])

    def record(self) -> dict[str, Any]:
        """What a run directory keeps: original sample numbers, by client and part, and how many
        of each label they are."""
        original = self.samples.index
        return {
            **({"data": self.samples.origin} if self.samples.origin else {}),
            **self.partition_facts,
            "public": self.samples.public_index.tolist(),
            "clients": [
                {part: original[where].tolist() for part, where in vars(split).items()}
                | {"labels": self._label_counts(split)}
                for split in self.splits
            ],
        }

    def _label_counts(self, split: ClientSplit) -> dict[str, list[int]]:
        labels, classes = self.samples.y, self.samples.classes
        return {
            part: np.bincount(labels[where], minlength=classes).tolist()
            for part, where in vars(split).items()
        }


def build_federation(
    dataset: Dataset,
    partition: Partition,
    split: Split,
    clients: int,
    seed: int,
    fresh_test: int = 0,
    fresh_mix: FreshMix = "test",
) -> Federation:
    """Load, divide among clients, and divide each client's samples."""
    samples = _recognised(dataset.load(seed))
    if clients * SMALLEST_CLIENT > len(samples.y):
        raise ConfigError(
            f"{clients} clients need at least {clients * SMALLEST_CLIENT} samples "
            f"({SMALLEST_CLIENT} each), there are {len(samples.y)}",
            "clients",
        )
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
    before, minimum = owner, partition.minimum_size()
    owner = move_to_minimum(owner, clients, minimum, random)
    holdings = held_by(owner, clients)
    smallest = min(range(clients), key=lambda client: len(holdings[client]))
    if len(holdings[smallest]) < SMALLEST_CLIENT:
        name = facts["client_names"][smallest] if "client_names" in facts else smallest
        raise ConfigError(
            f"client {name} has {len(holdings[smallest])} samples; each needs "
            f"{SMALLEST_CLIENT} (train, validation, test): fewer clients, or a larger minimum",
            "partition",
        )
    splits = [split_client(held, split, seed, client) for client, held in enumerate(holdings)]
    if fresh_test:
        if isinstance(partition, Given):
            raise ConfigError(
                "given clients may differ in more than labels: only they have samples like theirs",
                "fresh_test",
            )
        samples, splits = freshly_tested(samples, splits, fresh_test, fresh_mix, seed)
    samples, scales = standardised(replace(samples, spare=None), splits)
    facts |= scales | {
        "minimum": minimum,
        "moved_to_minimum": int((owner != before).sum()),
        "sizes": [len(held) for held in holdings],
    }
    return Federation(samples, splits, facts)


def _recognised(samples: Samples) -> Samples:
    """A user's own dataset need not say that its samples are tokens."""
    if samples.tokens is not None:
        return samples
    parts = [part for part in (samples.x, samples.public_x) if len(part)]
    tokens = all_tokens([tokens_in(part, 0, "samples") for part in parts])
    return replace(samples, tokens=tokens)


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
    wanted = np.array([_label_quota(samples, split, count, mix) for split in splits])
    most = wanted.max(axis=0)
    left = numpy_stream(seed, "fresh-test").permutation(spare.where)
    taken = []
    for label, needed in enumerate(most):
        there = left[spare.all.y[left] == label]
        if len(there) < needed:
            raise ConfigError(
                f"{needed} samples of label {label} are needed that no client holds, there are "
                f"{len(there)}: fewer, or fewer data.samples",
                "fresh_test",
            )
        taken.append(there[:needed])
    first = len(samples.y) + np.cumsum(most) - most  # where each label's begin
    return with_spare(samples, np.concatenate(taken)), [
        replace(
            split,
            test=np.concatenate(
                [start + np.arange(n) for start, n in zip(first, own, strict=True)]
            ),
            unused=np.concatenate([split.unused, split.test]),
        )
        for split, own in zip(splits, wanted, strict=True)
    ]


def _label_quota(samples: Samples, split: ClientSplit, count: int, mix: FreshMix) -> np.ndarray:
    """How many of each label make ``count`` with a client's mix; none is off by more than one."""
    alike = split.test if mix == "test" else np.concatenate([*vars(split).values()])
    upto = np.cumsum(np.bincount(samples.y[alike], minlength=samples.classes)) / len(alike)
    return np.diff(np.round(upto * count), prepend=0).astype(int)


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
    shares = (split.train[random.integers(len(split.train))], split.validation, split.test)
    sizes = [max(1, round(share * len(held))) for share in shares]
    while sum(sizes) > len(held):  # rounding took too much
        sizes[sizes.index(max(sizes))] -= 1
    return ClientSplit(*np.split(random.permutation(held), np.cumsum(sizes)))
