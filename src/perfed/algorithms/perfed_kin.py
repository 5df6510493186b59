"""PerFed-Kin: PerFed-Evidence with a table of evidence for each kind of client.

One table for all is wrong where clients disagree on what a label means, or see other pictures. So
the server asks who is of one kind, by what it is told anyway: soft decisions on the public set.
What a client sends and what it does with a table stay as in PerFed-Evidence.

- **Fit.** A client fits a group if the comparisons of classes that *the others* of the group make
  agree with its own: ρ, the correlation over public samples and the client's classes, each class
  weighing as much as the client speaks of it.
- **Groups.** All begin as one. A group is split in two if both halves gain: within each, clients
  must fit the others of their half better than the others of the whole group, by more than
  ``standard_errors`` of the mean over clients. Half of a group is a poorer witness than
  the whole, so a split that follows chance makes at least one half fit worse. The split that is
  tried is the best one found from the principal directions of what the group's own table leaves
  unexplained, after clients have moved to the half that they fit better.
- **Trust.** A client gets its group's table, and the mean gain of its group as a prior for its own
  gate, times how well it fits in: fully from half of the group's mean ρ on, not at all below a
  quarter of it. A client of a kind of its own fits nobody; what others gained proves nothing to it,
  and it listens to its own validation samples only.
- **Influence.** Numbers of samples count up to CAP times the upper quartile of what clients tell.

Only who has trained is heard, so there is no opening, and no client is taught in the first round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from perfed.algorithms.perfed_evidence import (
    RIDGE,
    SMALLEST_PROBABILITY,
    PerFedEvidence,
    first_hand,
)
from perfed.core.algorithm import Client, ClientInfo, Reply, Server, algorithms
from perfed.core.declaration import Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree

# Share of a client's weight that the classes it never speaks of have, all together: far below one
# sample, and the same for two classes as for a thousand.
SMALLEST_SHARES = 1e-3
CAP = 4.0
SMALLEST_GROUP = 2
DIRECTIONS = 2
MOVES = 6


@algorithms.register("perfed-kin")
@dataclass(frozen=True)
class PerFedKin(PerFedEvidence):
    standard_errors: float = option(
        2.0,
        "a group is split if clients of both halves fit their half better than the whole group, by "
        "more than so many standard errors",
        ge=0,
    )

    has_opening = False

    def messages(self) -> Messages:
        told = super().messages()
        assert told.down is not None
        down = {name: Maybe(entry) for name, entry in told.down.items()}
        return Messages(up=told.up, down=down, evaluation={})

    def client_round(self, client: Client, message: Message) -> Message:
        if "evidence" not in message.arrays:
            client.weights = client.sgd(client.weights, first_hand, stream=0)
            return super().first_message(client)
        return super().client_round(client, message)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        now = {str(r.client.id): dict(r.message) for r in replies}
        bank = self.remembered(state.get("bank", {}), now)

        def everybodys(name: str) -> Tensor:
            return torch.stack([torch.as_tensor(sent[name]).cpu() for sent in bank.values()])

        said = Witnesses.hear(everybodys("soft_decisions"), everybodys("samples"))
        kind = self.kinds(said, [int(name) for name in bank])
        gains = everybodys("gains")
        members = one_hot(kind).T.to(gains)  # (groups, clients)
        prior = torch.einsum("gm,mbw->gbw", members, gains) / members.sum(1)[:, None, None]
        belongs = self.belonging(said, kind).to(gains)
        tables = torch.stack([said.table(kind == group) for group in range(len(members))])
        device = replies[0].message["soft_decisions"].device
        return {
            "bank": bank,
            "tables": tables.to(gains).to(device),
            "prior": prior.to(device),
            "kind": {name: kind[row] for row, name in enumerate(bank)},
            "belongs": {name: belongs[row] for row, name in enumerate(bank)},
            # Of a client that was never heard it is known only how many are of the largest kind.
            "largest": members.sum(1).argmax(),
            "share": members.sum(1).max() / len(bank),
        }

    def remembered(self, bank: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """What every client said last."""
        return {**bank, **now}

    def kinds(self, said: Witnesses, clients: Sequence[int]) -> Tensor:
        """The group of each client, from 0."""
        return found_kinds(said, self.standard_errors)

    def belonging(self, said: Witnesses, kind: Tensor) -> Tensor:
        return belonging(said, kind)

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        if not state:
            return Message()
        name = str(client.id)
        kind = int(state["kind"].get(name, state["largest"]))
        trust = float(state["belongs"].get(name, state["share"]))
        return Message(evidence=state["tables"][kind], gains=state["prior"][kind] * trust)

    def describe(self, before: Tree, state: Tree) -> dict[str, Any]:
        return {"kinds": {name: int(kind) for name, kind in state["kind"].items()}}


@dataclass(frozen=True)
class Witnesses:
    """What m clients said of the public set, as comparisons of classes, and what each adds to the
    linear system of a table (see PerFed-Evidence)."""

    spoken: Tensor
    """q: how much each speaks of each class, (m, N)."""
    samples: Tensor
    laplacian: Tensor
    right: Tensor
    """What each adds to the right-hand side: its log-ratios, less their mean under q, times samples
    and q, (m, N, |P|)."""
    products: Tensor
    """Of any two classes of a client, the sum of the products of these over the public set,
    (m, N, N)."""

    @classmethod
    def hear(cls, decisions: Tensor, samples: Tensor) -> Witnesses:
        decisions, samples = decisions.double(), samples.double()
        samples = samples.clamp(max=CAP * float(samples.quantile(0.75)))
        spoken = decisions.mean(1) + SMALLEST_SHARES / decisions.shape[2]
        spoken = spoken / spoken.sum(1, keepdim=True)
        ratios = decisions.clamp(min=SMALLEST_PROBABILITY).log() - spoken.log()[:, None]
        ratios = ratios - torch.einsum("mpy,my->mp", ratios, spoken)[..., None]
        weights = samples[:, None] * spoken
        laplacian = torch.diag_embed(weights) - weights[:, :, None] * spoken[:, None]
        right = (weights[:, None] * ratios).mT.contiguous()
        return cls(spoken, samples, laplacian, right, right @ right.mT)

    def __len__(self) -> int:
        return len(self.samples)

    def only(self, chosen: Tensor) -> Witnesses:
        """Some of them, by number."""
        return Witnesses(**{name: values[chosen] for name, values in vars(self).items()})

    @property
    def voice(self) -> Tensor:
        """How many samples stand behind a client's comparisons: none, if it has one class."""
        return self.samples * (1 - (self.spoken**2).sum(1))

    def table(self, members: Tensor) -> Tensor:
        """The evidence of a group, |P|×N; every row sums to zero."""
        chosen = members.double()
        system = torch.einsum("m,mab->ab", chosen, self.laplacian)
        system = system + _ridge(system, (chosen @ self.samples) / chosen.sum())
        table: Tensor = torch.linalg.solve(system, self._sum(chosen)).T
        return table - table.mean(1, keepdim=True)

    def fit(self, members: Tensor) -> Tensor:
        """ρ: the correlation of each client's comparisons with the table of the *other* members,
        over public samples and the client's classes, each class in proportion to q.

        Sums over the public set are made first, and a member's own part is taken out of them: so no
        table of |P|×N numbers is made for each client.
        """
        chosen = members.double()
        own, mine = chosen[:, None, None], self.products
        everything = self._sum(chosen)
        with_me = torch.einsum("ap,kbp->kab", everything, self.right)
        squares = everything @ everything.T - own * (with_me + with_me.mT - mine)
        system = torch.einsum("j,jab->ab", chosen, self.laplacian) - own * self.laplacian
        left = (chosen.sum() - chosen).clamp(min=1)
        system = system + _ridge(system, (chosen @ self.samples - chosen * self.samples) / left)
        solved = torch.linalg.inv(system)
        both = torch.einsum("kab,kba->k", solved, with_me - own * mine)
        theirs = torch.einsum("kab,kab->k", solved @ squares @ solved.mT, self.laplacian)
        yours = torch.einsum("kaa,ka->k", mine, 1 / self.spoken)
        scale = (theirs.clamp(min=0) * yours / self.samples).sqrt()
        return torch.where(scale > 1e-12, both / scale.clamp(min=1e-12), 0.0)

    def leftovers(self) -> Tensor:
        """What the table of all leaves unexplained of each client's comparisons, as vectors; a
        client's comparisons have length one, each class in proportion to √q."""
        table = self.table(torch.ones(len(self), dtype=torch.bool)).T
        told = table - torch.einsum("yp,my->mp", table, self.spoken)[:, None]
        root = self.spoken.sqrt()[..., None]
        said, told = normalize((self.right / root).flatten(1)), normalize((told * root).flatten(1))
        return said - (said * told).sum(1, keepdim=True) * told

    def _sum(self, chosen: Tensor) -> Tensor:
        return torch.einsum("m,myp->yp", chosen, self.right)


def _ridge(system: Tensor, samples: Tensor) -> Tensor:
    unit = torch.eye(system.shape[-1], dtype=system.dtype)
    return RIDGE * samples.clamp(min=1e-9)[..., None, None] * unit


def found_kinds(said: Witnesses, standard_errors: float) -> Tensor:
    """The group of each client, from 0."""
    kind, last, open_groups = torch.zeros(len(said), dtype=torch.long), 0, [0]
    while open_groups:
        group = open_groups.pop()
        members = torch.where(kind == group)[0]
        half = split(said.only(members), standard_errors)
        if half is not None:
            last += 1
            kind[members[half]] = last
            open_groups += [group, last]
    return _moved(said, kind)


def split(said: Witnesses, standard_errors: float) -> Tensor | None:
    """Who is in the second half of the best split, if both halves gain by it."""
    if len(said) < 2 * SMALLEST_GROUP:
        return None
    everyone = torch.ones(len(said), dtype=torch.bool)
    whole, heard = said.fit(everyone), said.voice / (said.voice + 1)
    best, proof = None, standard_errors
    for direction in _leftover_directions(said, heard):
        half = _moved(said, (direction > 0).long())
        if _smallest(half, 2) < SMALLEST_GROUP:
            continue
        sides = [half == 0, half == 1]
        gain = torch.where(sides[1], said.fit(sides[1]), said.fit(sides[0])) - whole
        found = min(_in_standard_errors(gain[side], heard[side]) for side in sides)
        if found > proof:
            best, proof = half == 1, found
    return best


def _leftover_directions(said: Witnesses, heard: Tensor) -> Tensor:
    """Principal directions, over clients, of what the group's table leaves unexplained."""
    left = said.leftovers() * heard[:, None]
    alike = left @ left.T
    directions: Tensor = torch.linalg.eigh(alike - alike.diag().diag())[1].T
    return directions.flip(0)[:DIRECTIONS]


def _moved(said: Witnesses, kind: Tensor) -> Tensor:
    """The groups after every client has moved to the one it fits best, some times."""
    for _ in range(MOVES):
        moved = torch.stack([said.fit(kind == group) for group in range(_groups(kind))]).argmax(0)
        if torch.equal(moved, kind) or _smallest(moved, _groups(kind)) < SMALLEST_GROUP:
            break
        kind = moved
    return kind


def _groups(kind: Tensor) -> int:
    return int(kind.max()) + 1


def _smallest(kind: Tensor, groups: int) -> int:
    return int(kind.bincount(minlength=groups).min())


def _in_standard_errors(gain: Tensor, weight: Tensor) -> float:
    """A weighted mean over clients, in standard errors of it."""
    share = weight / weight.sum()
    mean = (share * gain).sum()
    # Kish's number of clients that count alike.
    number = 1 / (share**2).sum()
    variance = (share * (gain - mean) ** 2).sum() / (number - 1).clamp(min=0.1)
    return float(mean / variance.clamp(min=1e-18).sqrt())


def belonging(said: Witnesses, kind: Tensor) -> Tensor:
    """How far each client may rely on what its group gained: its fit, shrunk by one sample towards
    the group's mean fit, as a share of that mean; from a half on fully, below a quarter not at all.
    Whose labels mean something else fits by chance only, around zero."""
    result = torch.ones(len(said), dtype=torch.double)
    for group in range(_groups(kind)):
        members = kind == group
        voice, fit = said.voice[members], said.fit(members)[members]
        usual = ((voice * fit).sum() / voice.sum().clamp(min=1e-9)).clamp(min=0.05)
        result[members] = (voice * fit + usual) / (voice + 1) / usual
    return (4 * result - 1).clamp(0, 1)
