"""How the private samples are divided among K clients.

Every partition gives each sample to exactly one client, depends on nothing but the labels, the
options and the seed, and always ends. Label-wise Dirichlet draws with a small α leave many clients
empty (about 38 of 100 at α=0.01), and redrawing until none is empty may never end; so a minimum is
reached by *moving* samples from the largest clients, and the run records how many were moved, and
to whom. Whoever wants to study only clients as they were drawn leaves the small ones out instead.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from perfed.core.errors import ConfigError
from perfed.core.registry import Component, Registry
from perfed.core.schema import option

MINIMUM_HELP = "smallest number of samples of a client; 'repair' says what happens if one has fewer"
REPAIR_HELP = (
    "true: move samples from the largest clients to those below the minimum; false: leave those "
    "below it out, so that there are fewer clients, numbered anew"
)


class Partition(Component):
    registry: ClassVar[Registry[Partition]]

    @abstractmethod
    def assign(
        self, labels: np.ndarray, classes: int, clients: int, random: np.random.Generator
    ) -> np.ndarray:
        """The client of each sample."""

    def minimum_size(self) -> int:
        """What :func:`move_to_minimum` then brings every client up to."""
        return 0

    def leaves_out_small(self) -> bool:
        """Whether clients below the minimum are left out instead."""
        return False


partitions: Registry[Partition] = Registry("partition")
Partition.registry = partitions


def _pieces(total: int, shares: np.ndarray) -> np.ndarray:
    """The sizes of consecutive pieces in proportion to ``shares`` (which sum to one)."""
    ends = np.round(np.cumsum(shares)[:-1] * total).astype(int)
    return np.diff(np.clip(ends, 0, total), prepend=0, append=total)


def _dirichlet(random: np.random.Generator, alpha: float, size: int) -> np.ndarray:
    """One draw of a symmetric Dirichlet, also where α is so small that gamma draws underflow.

    A Gamma(α) variate is a Gamma(α+1) variate times U^(1/α): its logarithm never underflows.
    """
    logs = np.log(random.gamma(alpha + 1, size=size)) + np.log(random.random(size)) / alpha
    shares = np.exp(logs - logs.max())
    return np.asarray(shares / shares.sum())


@partitions.register("dirichlet")
@dataclass(frozen=True)
class LabelwiseDirichlet(Partition):
    """The paper's Dir_K(α): each label's samples are divided among all clients by a draw of its
    own. Small α skews both the labels and the sizes of the clients."""

    alpha: float = option(0.01, "concentration; small means skewed", gt=0)
    minimum: int = option(20, MINIMUM_HELP, ge=0)
    repair: bool = option(True, REPAIR_HELP)

    def assign(
        self, labels: np.ndarray, classes: int, clients: int, random: np.random.Generator
    ) -> np.ndarray:
        owner = np.empty(len(labels), dtype=np.int64)
        for label in range(classes):
            samples = random.permutation(np.flatnonzero(labels == label))
            shares = _dirichlet(random, self.alpha, clients)
            owner[samples] = np.repeat(np.arange(clients), _pieces(len(samples), shares))
        return owner

    def minimum_size(self) -> int:
        return self.minimum

    def leaves_out_small(self) -> bool:
        return not self.repair


@partitions.register("client-dirichlet")
@dataclass(frozen=True)
class ClientwiseDirichlet(Partition):
    """Each client draws its own label mix from Dir_N(α); sizes are equal.

    Clients take turns drawing a label from their mix among those that still have samples.
    """

    alpha: float = option(0.1, "concentration; small means few labels per client", gt=0)

    def assign(
        self, labels: np.ndarray, classes: int, clients: int, random: np.random.Generator
    ) -> np.ndarray:
        mixes = np.stack([_dirichlet(random, self.alpha, classes) for _ in range(clients)])
        piles = [list(random.permutation(np.flatnonzero(labels == c))) for c in range(classes)]
        owner = np.empty(len(labels), dtype=np.int64)
        for turn in range(len(labels)):
            client = turn % clients
            left = np.array([len(pile) > 0 for pile in piles])
            chances = np.where(left, mixes[client], 0.0)
            if chances.sum() < 1e-12:  # none of its labels is left: whatever is
                chances = left.astype(float)
            label = random.choice(classes, p=chances / chances.sum())
            owner[piles[label].pop()] = client
        return owner


@partitions.register("groups")
@dataclass(frozen=True)
class LatentGroups(Partition):
    """Clients belong to latent groups; within a group all draw from one label mix.

    The labels are dealt to the groups; a share ``mixed`` of the samples goes to a group drawn
    uniformly instead. Client k is in group k mod ``groups``.
    """

    groups: int = option(3, "how many groups", ge=1)
    mixed: float = option(0.0, "share of samples that ignore the groups", ge=0, le=1)

    def assign(
        self, labels: np.ndarray, classes: int, clients: int, random: np.random.Generator
    ) -> np.ndarray:
        if self.groups > min(clients, classes):
            raise ConfigError(
                f"{self.groups} groups for {clients} clients and {classes} labels: "
                f"must be at most {min(clients, classes)}",
                "partition.groups",
            )
        group_of_label = random.permutation(classes) % self.groups
        stray = random.random(len(labels)) < self.mixed
        anywhere = random.integers(self.groups, size=len(labels))
        group = np.where(stray, anywhere, group_of_label[labels])
        owner = np.empty(len(labels), dtype=np.int64)
        for g in range(self.groups):
            members = np.arange(g, clients, self.groups)
            owner[group == g] = _deal(int((group == g).sum()), len(members), random, members)
        return owner


@partitions.register("iid")
@dataclass(frozen=True)
class IID(Partition):
    """All clients alike: samples dealt out at random, equally many each."""

    def assign(
        self, labels: np.ndarray, classes: int, clients: int, random: np.random.Generator
    ) -> np.ndarray:
        return _deal(len(labels), clients, random, np.arange(clients))


@partitions.register("shards")
@dataclass(frozen=True)
class Shards(Partition):
    """Samples sorted by label and cut in equal shards, ``per_client`` of them for each client, so
    that a client sees about that many labels (McMahan et al.)."""

    per_client: int = option(2, "shards per client, and so about as many labels", ge=1)

    def assign(
        self, labels: np.ndarray, classes: int, clients: int, random: np.random.Generator
    ) -> np.ndarray:
        shuffled = random.permutation(len(labels))
        by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
        owners = random.permutation(np.repeat(np.arange(clients), self.per_client))
        owner = np.empty(len(labels), dtype=np.int64)
        whole, longer = divmod(len(labels), len(owners))
        owner[by_label] = np.repeat(owners, whole + (np.arange(len(owners)) < longer))
        return owner


@partitions.register("given")
@dataclass(frozen=True)
class Given(Partition):
    """The data says whose each sample is: a folder for each client, or a column or array of ids."""

    def assign(
        self, labels: np.ndarray, classes: int, clients: int, random: np.random.Generator
    ) -> np.ndarray:
        raise ConfigError("the data names no clients", "partition")


def _deal(count: int, hands: int, random: np.random.Generator, names: np.ndarray) -> np.ndarray:
    """``count`` cards dealt to ``hands`` as evenly as possible, in random order."""
    return np.asarray(names[random.permutation(np.arange(count) % hands)])


class Held:
    """Each client's samples, in their order: two arrays, however many clients there are."""

    def __init__(self, owner: np.ndarray, clients: int) -> None:
        self._order = np.argsort(owner, kind="stable")
        ends = np.searchsorted(owner[self._order], np.arange(clients), side="right")
        self.sizes = np.diff(ends, prepend=0)
        self._ends = ends

    def of(self, client: int) -> np.ndarray:
        return self._order[self._ends[client] - self.sizes[client] : self._ends[client]]


def move_to_minimum(
    owner: np.ndarray, clients: int, minimum: int, random: np.random.Generator
) -> np.ndarray:
    """Move one random sample at a time from the largest client to those below ``minimum``.

    Ends always: the total deficit falls by one with each move, and while K·minimum ≤ n the largest
    client is above the minimum whenever some client is below it.
    """
    if clients * minimum > len(owner):
        raise ConfigError(
            f"{clients} clients with at least {minimum} samples each need "
            f"{clients * minimum}, there are {len(owner)}",
            "partition.minimum",
        )
    if np.bincount(owner, minlength=clients).min() >= minimum:
        return owner
    dealt, owner = Held(owner, clients), owner.copy()
    holdings = [list(random.permutation(dealt.of(client))) for client in range(clients)]
    largest = [(-len(held), client) for client, held in enumerate(holdings)]
    heapq.heapify(largest)
    for client, held in enumerate(holdings):
        while len(held) < minimum:
            size, donor = heapq.heappop(largest)
            if -size != len(holdings[donor]):  # this entry is out of date
                heapq.heappush(largest, (-len(holdings[donor]), donor))
                continue
            sample = holdings[donor].pop()
            held.append(sample)
            owner[sample] = client
            heapq.heappush(largest, (-len(holdings[donor]), donor))
    return owner
