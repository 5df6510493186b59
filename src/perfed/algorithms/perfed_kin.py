"""PerFed-Kin: PerFed-Evidence with a table of evidence for each kind of client.

One table for all is wrong where clients disagree on what a label means, or see other pictures. So
the server asks who is of one kind, by what it is told anyway: soft decisions on the public set.
What a client sends stays as in PerFed-Evidence.

- **Fit.** A client fits a group if the comparisons of classes that *the others* of the group make
  agree with its own: ρ, the correlation over public samples and the client's classes, each class
  weighing as much as the client speaks of it.
- **Groups.** All begin as one. A group is split in two if two things hold. Clients gain: in both
  halves they fit the others of their half better than the others of the whole group, by more than
  ``standard_errors`` of the mean over clients (the geometric mean of both halves). Half of a group
  is a poorer witness than the whole, so a split that follows chance makes at least one half fit
  worse. The halves need not gain alike: where one kind is louder, the table of both is nearly its
  own, and only the other kind has much to gain. And clients differ: in both halves the other half
  explains less than half of what their own explains (ρ²). Clients who agree on nearly all gain by
  any split along what little they do not agree on, surely and for nothing. The split that is tried
  is the best one found from the principal directions of what the group's own table leaves
  unexplained, after clients have moved to the half that they fit better. When no group can be split
  any more, all clients move to the group that they fit best, and all groups are tried again.
- **Trust.** A client gets its group's table, and what the others of its group gained as a prior for
  its own gate: for it, as far as it is probably their kin, and against it, as far as it is probably
  a stranger among them. Kin fits as the others do, a stranger by chance. A client of a kind of its
  own fits nobody; what helps the others harms it, and a few validation samples that happen to speak
  for the taught model do not outweigh that.
- **Home.** Both models of a client have learned its training samples, so these cannot tell which is
  better elsewhere. But a student that is taught what is wrong here has to unlearn it again and
  again, and never knows them as well as the witness. So they speak in the gate, too: their mean
  counts like TRAINING_SAMPLES validation samples, however many they are.
- **Labels to expect.** A client with few samples knows little of its own label mix. So it is told
  what mix to expect before its own labels are counted: that of the others, each weighing as much as
  it makes likely what the client speaks of, n·q. Where groups of clients have labels of their own,
  it is their group's; where clients are alike, everybody's; who is like nobody gets a guess as good
  as the uniform one.
- **Influence.** Numbers of samples count up to CAP times the upper quartile of what clients tell.

Only who has trained is heard, so there is no opening, and no client is taught in the first round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.algorithms.lessons import first_hand
from perfed.algorithms.perfed_evidence import PerFedEvidence, label_mix, trial
from perfed.algorithms.witnesses import Witnesses
from perfed.core.algorithm import Client, ClientInfo, Reply, Server, algorithms
from perfed.core.declaration import PROBABILITIES, Array, Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree, Weights

# What a client's training samples say of its student counts like so many validation samples.
TRAINING_SAMPLES = 40.0
# How many times the upper quartile of all a client's number of samples may count.
CAP = 4.0
# The share of the mix to expect that is the others'; the rest is uniform, for no label is excluded.
OF_OTHERS = 0.9
SMALLEST_GROUP = 2
# Of what clients' own half explains, another kind explains less than this share.
ANOTHER_KIND = 0.5
DIRECTIONS = 2
MOVES = 6


@algorithms.register("perfed-kin")
@dataclass(frozen=True)
class PerFedKin(PerFedEvidence):
    standard_errors: float = option(
        1.2,
        "a group is split if clients of both halves fit their half better than the whole group, by "
        "more than this many standard errors (the geometric mean of both halves)",
        ge=0,
    )

    has_opening = False

    def messages(self) -> Messages:
        told = super().messages()
        assert told.down is not None
        down = {**told.down, "mix": Array(("N",), PROBABILITIES)}
        maybe = {name: Maybe(entry) for name, entry in down.items()}
        return Messages(up=told.up, down=maybe, evaluation={})

    def client_round(self, client: Client, message: Message) -> Message:
        if "evidence" not in message.arrays:
            client.weights = client.sgd(client.weights, first_hand, stream=0)
            return super().first_message(client)
        return super().client_round(client, message)

    def mix(self, client: Client, message: Message) -> Tensor:
        return label_mix(client.label_counts(), no_label_excluded(message["mix"]))

    def at_home(self, client: Client, student: Weights, log_mix: Tensor) -> Tensor | float:
        gains, _ = trial(client, student, log_mix, "train")
        return TRAINING_SAMPLES * gains

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        now = {str(r.client.id): dict(r.message) for r in replies}
        bank = self.remembered(state.get("bank", {}), now)

        def everybodys(name: str) -> Tensor:
            return torch.stack([torch.as_tensor(sent[name]).cpu() for sent in bank.values()])

        said = Witnesses.hear(everybodys("soft_decisions"), bounded(everybodys("samples")))
        kind = self.kinds(said, [int(name) for name in bank])
        gains = everybodys("gains")
        expected = self.expected(said, kind, gains)
        mixes = expected_mixes(said)
        tables = torch.stack([said.table(kind == group) for group in range(_groups(kind))])
        largest = kind.bincount().argmax()
        in_largest = (kind == largest).to(gains)
        device = replies[0].message["soft_decisions"].device
        return {
            "bank": bank,
            "tables": tables.to(gains).to(device),
            "kind": {name: kind[row] for row, name in enumerate(bank)},
            "told": {
                name: {"gains": expected[row].to(device), "mix": mixes[row].to(gains).to(device)}
                for row, name in enumerate(bank)
            },
            # Of a client that was never heard it is known only how many are of the largest kind.
            "largest": largest,
            "newcomers": {
                "gains": torch.einsum("m,mbw->bw", in_largest, expected).to(device) / len(bank),
                "mix": mixes.mean(0).to(gains).to(device),
            },
        }

    def remembered(self, bank: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """What every client said last."""
        return {**bank, **now}

    def kinds(self, said: Witnesses, clients: Sequence[int]) -> Tensor:
        """The group of each client, from 0."""
        return found_kinds(said, self.standard_errors)

    def expected(self, said: Witnesses, kind: Tensor, gains: Tensor) -> Tensor:
        return prior(gains, kind, kinship(said, kind))

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        if not state:
            return Message()
        name = str(client.id)
        kind = int(state["kind"].get(name, state["largest"]))
        told = state["told"].get(name, state["newcomers"])
        return Message(evidence=state["tables"][kind], **told)

    def describe(self, before: Tree, state: Tree) -> dict[str, Any]:
        return {"kinds": {name: int(kind) for name, kind in state["kind"].items()}}

    def placed(self, state: Tree, replies: Sequence[Reply]) -> dict[int, int]:
        """A group goes by its first member: it is numbered anew in every round."""
        first: dict[int, int] = {}
        for name, kind in sorted(state["kind"].items(), key=lambda named: int(named[0])):
            first.setdefault(int(kind), int(name))
        clients = [reply.client.id for reply in replies]
        return {client: first[int(state["kind"][str(client)])] for client in clients}


def bounded(samples: Tensor) -> Tensor:
    """Numbers of samples as far as they count."""
    samples = samples.double()
    return samples.clamp(max=CAP * float(samples.quantile(0.75)))


def expected_mixes(said: Witnesses) -> Tensor:
    """The label mix that each client may expect before its own labels are counted, (m, N)."""
    counts = said.samples[:, None] * said.spoken
    mixes = label_mix(counts).double()
    candidates = torch.cat([mixes, torch.full_like(mixes[:1], 1 / mixes.shape[1])])
    likelihood = counts @ candidates.log().T
    likelihood.diagonal().fill_(-math.inf)  # nobody is a witness to itself
    others = likelihood.softmax(1) @ candidates
    return OF_OTHERS * others + (1 - OF_OTHERS) / mixes.shape[1]


def no_label_excluded(mix: Tensor) -> Tensor:
    """What a client was told to expect. In few bits, or from a server that lies, a label may have
    nothing left; the others are then lowered for it."""
    least = (1 - OF_OTHERS) / len(mix)
    if bool((mix >= least).all()):
        return mix
    mix = mix.clamp(min=least)
    return mix / mix.sum()


OfBoth = Callable[[Sequence[float]], float]
"""What the gain of both halves is."""


def geometric_mean(gains: Sequence[float]) -> float:
    return math.prod(max(gain, 0.0) for gain in gains) ** (1 / len(gains))


def found_kinds(
    said: Witnesses, standard_errors: float, of_both: OfBoth = geometric_mean
) -> Tensor:
    """The group of each client, from 0."""
    kind, groups = torch.zeros(len(said), dtype=torch.long), 0
    whole: set[tuple[int, ...]] = set()
    while groups < _groups(kind):  # a move may show what can be split
        groups = _groups(kind)
        kind = _moved(said, _divided(said, kind, standard_errors, of_both, whole))
    return kind


def _divided(
    said: Witnesses,
    kind: Tensor,
    standard_errors: float,
    of_both: OfBoth,
    whole: set[tuple[int, ...]],
) -> Tensor:
    """The groups after every split that there is reason for; who is in a group that cannot be split
    is added to ``whole``, and not tried again."""
    kind, open_groups = kind.clone(), [*range(_groups(kind))]
    while open_groups:
        group = open_groups.pop()
        members = torch.where(kind == group)[0]
        who = tuple(members.tolist())
        half = None
        if who not in whole:
            half = split(said.only(members), standard_errors, of_both)
        if half is None:
            whole.add(who)
        else:
            new = _groups(kind)
            kind[members[half]] = new
            open_groups += [group, new]
    return kind


def split(
    said: Witnesses, standard_errors: float, of_both: OfBoth = geometric_mean
) -> Tensor | None:
    """Who is in the second half of the best split, if the halves gain by it and differ."""
    if len(said) < 2 * SMALLEST_GROUP:
        return None
    everyone = torch.ones(len(said), dtype=torch.bool)
    whole, heard = said.fit(everyone), said.heard
    best, proof = None, standard_errors
    for direction in _leftover_directions(said, heard):
        half = _moved(said, (direction > 0).long())
        if _smallest(half, 2) < SMALLEST_GROUP:
            continue
        sides = [half == 0, half == 1]
        first, second = (said.fit(side) for side in sides)
        own, other = (torch.where(side, first, second) for side in sides)
        found = of_both([_in_standard_errors((own - whole)[s], heard[s]) for s in sides])
        if found > proof and all(_differ(own[s], other[s], heard[s]) for s in sides):
            best, proof = half == 1, found
    return best


def _differ(own: Tensor, other: Tensor, weight: Tensor) -> bool:
    """Does the other half explain too little of what clients say to be of their kind?"""
    return bool((weight @ other).clamp(min=0) ** 2 < ANOTHER_KIND * (weight @ own) ** 2)


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


def kinship(said: Witnesses, kind: Tensor) -> Tensor:
    """How probable it is that each client is of its group's kind, by Bayes' rule.

    Kin fits the group as the others do: its ρ is normal around their mean. A stranger fits by
    chance: its ρ is normal around zero. Both with the variance that the others have, as if one more
    of them had fitted by chance; and with more of it, the less a client is heard. Before its ρ is
    known, a client is the one stranger among all others of its group and itself.
    """
    result = torch.ones(len(said), dtype=torch.double)
    for group in range(_groups(kind)):
        members = kind == group
        fit, heard = said.fit(members)[members], said.heard[members]
        weights = heard.repeat(len(heard), 1).fill_diagonal_(0)  # of the others
        total = weights.sum(1).clamp(min=1e-9)
        mean = ((weights @ fit) / total).clamp(min=0)
        around = (weights * (fit - mean[:, None]) ** 2).sum(1)
        variance = ((mean**2 + around) / total).clamp(min=1e-9)
        odds = heard * mean * (fit - mean / 2) / variance  # the logarithm of N(mean) / N(0)
        result[members] = (odds + math.log(max(len(fit) - 1, 1))).sigmoid()
    return result


def prior(gains: Tensor, kind: Tensor, kin: Tensor) -> Tensor:
    """What each client may expect to gain by each choice before its own samples are asked: what
    the others of its group gained if it is their kin, and as much less than nothing if it is not.
    Who has not been taught yet tells no gain at all, and does not count."""
    taught = (gains != 0).flatten(1).any(1)
    others = ((kind[:, None] == kind) & taught).to(gains).fill_diagonal_(0)
    mean = torch.einsum("kj,jbw->kbw", others, gains)
    mean = mean / others.sum(1).clamp(min=1)[:, None, None]
    share = kin.to(gains)[:, None, None]
    return share * mean - (1 - share) * mean.abs()
