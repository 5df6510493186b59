"""Which ideas were tried on the way to PerFed-Evidence, and what each gave.

    python benchmarks/screening.py    twelve minutes on one core

Handwritten digits only, and the seeds that settings are chosen by: this is how the algorithm was
found, not how good it is (that is successor.py). The frame of PerFed-CKT is written here once more,
for one small network, so that an idea is a few lines: all drawn clients' networks are trained at
once, and every idea sees the same clients, initial weights and mini-batches. Local training is of
the same clients at the same times, so that only the transfer differs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from committed import ROOT
from successor import FAMILIES, PARTITIONS, TUNING_SEEDS
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from perfed import Experiment
from perfed.algorithms.clustering import cmeans, nearest
from perfed.algorithms.perfed_evidence import (
    FLOOR,
    PRIOR_SAMPLES,
    SHARES,
    SHARPNESS,
    choice,
    concentrations,
    label_mix,
    pooled_evidence,
)
from perfed.algorithms.witnesses import SMALLEST_SHARE
from perfed.core.schema import from_mapping
from perfed.core.streams import numpy_stream, stream_key
from perfed.data import build_federation
from perfed.runs.directory import environment
from perfed.runs.tables import HARM, SMALL

SETTINGS: dict[str, dict[str, Any]] = {
    "3 groups": PARTITIONS["digits"]["3 groups"],
    "3 groups, 20 % mixed": {"name": "groups", "groups": 3, "mixed": 0.2},
} | {name: PARTITIONS["digits"][name] for name in ("Dir(0.01)", "Dir(0.1)", "Dir(1)", "IID")}
DIGITS = FAMILIES["digits"]
HIDDEN = DIGITS["models"]["architectures"][0]["hidden"][0]
CLUSTERS = 3
CENTRAL_STEPS = 2000
MOST_CLUSTERS = 5
NO_STRUCTURE = 0.25  # a silhouette below it tells of no clusters (Kaufman and Rousseeuw)
MOST_TRUST = 8.0  # λ_k is at most so many times λ, and at least that part of it

Weights = list[Tensor]  # of all clients' networks, one behind the other along the first dimension


# ----------------------------------------------------------------------- clients


class Clients:
    """A federation as tensors. A part's positions are filled up with zeros to the largest."""

    def __init__(self, experiment: Experiment) -> None:
        e = experiment
        federation = build_federation(e.data, e.partition, e.split, e.clients, e.seed)
        samples = federation.samples
        self.experiment = e
        self.count, self.classes = e.clients, samples.classes
        self.x = torch.tensor(samples.x).float().flatten(1)
        self.y = torch.tensor(samples.y).long()
        self.public = torch.tensor(samples.public_x).float().flatten(1)
        self.positions, self.sizes = {}, {}
        for part in ("train", "validation", "test"):
            held = [torch.as_tensor(getattr(split, part)).long() for split in federation.splits]
            self.positions[part] = torch.nn.utils.rnn.pad_sequence(held, batch_first=True)
            self.sizes[part] = torch.tensor([len(positions) for positions in held])
        labels = one_hot(self.y[self.positions["train"]], self.classes)
        self.counts = (labels * self.is_sample("train")[..., None]).sum(1).float()

    def is_sample(self, part: str) -> Tensor:
        return torch.arange(self.positions[part].shape[1]) < self.sizes[part][:, None]

    def correct(self, part: str, judge: Callable[[Tensor], Tensor]) -> Tensor:
        """Which samples of each client's part are classified correctly, (K, largest part)."""
        where = self.positions[part]
        return (judge(self.x[where]).argmax(2) == self.y[where]) & self.is_sample(part)

    def accuracy(self, judge: Callable[[Tensor], Tensor]) -> Tensor:
        return 100 * self.correct("test", judge).sum(1) / self.sizes["test"]


@dataclass(frozen=True)
class Draw:
    """Who takes part in a round, and on which samples: (steps, m, b) and (steps, m, b')."""

    clients: Tensor
    private: Tensor
    public: Tensor


def draws(clients: Clients, batches: str = "batches", everybody: bool = False) -> list[Draw]:
    e, how = clients.experiment, clients.experiment.training
    generator = torch.Generator().manual_seed(stream_key(e.seed, batches))
    selection = torch.Generator().manual_seed(stream_key(e.seed, "selection"))
    participants = e.clients if everybody else e.clients_per_round
    rounds = []
    for _ in range(e.rounds):
        drawn = torch.randperm(e.clients, generator=selection)[:participants]
        chance = torch.rand(how.steps, participants, how.batch_size, generator=generator)
        index = (chance * clients.sizes["train"][drawn][:, None]).long()
        shape = (how.steps, participants, how.public_batch_size)
        public = torch.randint(len(clients.public), shape, generator=generator)
        rounds.append(Draw(drawn, clients.positions["train"][drawn[:, None], index], public))
    return rounds


# ----------------------------------------------------------------------- ideas


@dataclass
class Frame:
    """What is known during a run. A client that is not drawn does not change, so what it said last
    is what it would say now; the server only knows it of those that took part."""

    clients: Clients
    mixes: Tensor  # (K, N)
    decisions: Tensor  # (K, |P|, N)
    known: Tensor  # (K,)
    last: Tensor  # who took part in the last round
    round: int = 0

    def others(self, drawn: Tensor) -> Tensor:
        """Whom the server knows beside each drawn client, (m, K)."""
        return self.known & (torch.arange(len(self.known)) != drawn[:, None])


@dataclass(frozen=True)
class Lesson:
    """For each drawn client: its teacher's soft decisions, the mix that they are spoken under, its
    own label mix, and how much it trusts the teacher: λ_k by λ."""

    targets: Tensor
    attention: Tensor
    mixes: Tensor
    trust: Tensor | float = 1.0


def uniform(clients: int, classes: int) -> Tensor:
    return torch.full((clients, classes), 1 / classes)


def squares(said: Tensor, target: Tensor) -> Tensor:
    return (said.softmax(2) - target).square().sum(2)


def divergence(said: Tensor, target: Tensor) -> Tensor:
    return (target * (target.clamp(min=1e-9).log() - said.log_softmax(2))).sum(2)


@dataclass(frozen=True)
class Idea:
    """Here: nothing is taught."""

    weight: float = 0.0
    distance: Callable[[Tensor, Tensor], Tensor] = squares
    by_content: bool = False  # public samples weigh as much as the teacher says about them
    first_hand: bool = False  # models trained alone speak, not those that are taught
    offsets: bool = False  # by label mixes; without, all mixes are uniform, which shifts nothing
    trust: Callable[[Frame, Tensor, Tensor], Tensor] | None = None  # one λ for all

    def lesson(self, frame: Frame, drawn: Tensor) -> Lesson:
        return Lesson(frame.decisions[drawn], frame.mixes[drawn], frame.mixes[drawn])


def by_noise(frame: Frame, drawn: Tensor, targets: Tensor) -> Tensor:
    """Theorem 2's λ_k* = σ²/(υ²ν), with one υ for all: the fewer samples, the more trust."""
    sizes = frame.clients.sizes["train"].float()
    return limited(sizes.median() / sizes[drawn])


def by_noise_and_distance(frame: Frame, drawn: Tensor, targets: Tensor) -> Tensor:
    """With υ_k² too: the farther the teacher is from what the client says, the less trust."""
    distance = (frame.decisions[drawn] - targets).square().sum((1, 2)).clamp(min=1e-6)
    sizes = frame.clients.sizes["train"].float()
    return limited(sizes.median() / sizes[drawn] * distance.median() / distance)


def limited(trust: Tensor) -> Tensor:
    return trust.clamp(1 / MOST_TRUST, MOST_TRUST)


def by_cluster(frame: Frame, drawn: Tensor) -> Tensor:
    """PerFed-CKT's server: the nearest centroid of what the last round's clients said."""
    random = numpy_stream(frame.clients.experiment.seed, "clusters", round=frame.round)
    centroids = cmeans(frame.decisions[frame.last], CLUSTERS, random)
    return torch.stack([centroids[nearest(centroids, own)] for own in frame.decisions[drawn]])


def by_silhouette(frame: Frame, drawn: Tensor) -> Tensor:
    """The same with as many clusters as have the best silhouette; if none has a good one, one."""
    random = numpy_stream(frame.clients.experiment.seed, "clusters", round=frame.round)
    heard = frame.decisions[frame.last]
    best, chosen = NO_STRUCTURE, cmeans(heard, 1, random)
    for clusters in range(2, MOST_CLUSTERS + 1):
        centroids = cmeans(heard, clusters, random)
        score = silhouette(heard, torch.stack([nearest(centroids, own) for own in heard]))
        if score > best:
            best, chosen = score, centroids
    return torch.stack([chosen[nearest(chosen, own)] for own in frame.decisions[drawn]])


def silhouette(decisions: Tensor, labels: Tensor) -> float:
    """How much nearer clients are to those of their own cluster than to those of the next: the
    mean of (b - a) / max(a, b), and 0 for one that is alone in its cluster."""
    distance = torch.cdist(decisions.flatten(1), decisions.flatten(1))
    member = one_hot(labels).float()  # (m, c)
    total, size = distance @ member, member.sum(0)
    own = total.gather(1, labels[:, None])[:, 0] / (size[labels] - 1)
    other = (total / size).masked_fill(member.bool(), torch.inf).min(1).values
    score = (other - own) / torch.maximum(other, own)
    alone = (size[labels] == 1) | (member.shape[1] == 1)
    return float(score.masked_fill(alone, 0.0).mean())


def by_kin(frame: Frame, drawn: Tensor, temperature: float) -> Tensor:
    """Everybody else's last words, weighted by how near they are to the client's own."""
    distance = torch.cdist(frame.decisions[drawn].flatten(1), frame.decisions.flatten(1)).square()
    others = frame.others(drawn)
    typical = (distance * others).sum(1, keepdim=True) / others.sum(1, keepdim=True)
    likeness = (-distance / (temperature * typical)).masked_fill(~others, -torch.inf).softmax(1)
    return torch.einsum("mk,kpn->mpn", likeness, frame.decisions)


@dataclass(frozen=True)
class Opinions(Idea):
    """Each client has a teacher of its own, with a label mix of its own. With offsets the student
    speaks under that mix, and its own mix is estimated around it."""

    server: Callable[[Frame, Tensor], Tensor] = by_cluster
    offsets: bool = True

    def lesson(self, frame: Frame, drawn: Tensor) -> Lesson:
        targets = self.server(frame, drawn)
        trust = self.trust(frame, drawn, targets) if self.trust else 1.0
        if not self.offsets:
            return Lesson(targets, frame.mixes[drawn], frame.mixes[drawn], trust)
        spoken = targets.mean(1).clamp(min=SMALLEST_SHARE / 10)
        around = 0.9 * spoken + 0.1 / targets.shape[2]
        return Lesson(targets, spoken, mix_around(frame.clients.counts[drawn], around), trust)


@dataclass(frozen=True)
class Evidence(Idea):
    """One teacher for all, without a label mix; each client listens under a mix of its own."""

    weight: float = 4.0
    pool: Callable[[Tensor, Tensor], Tensor] = pooled_evidence
    attention: float = 0.5  # share of the client's own mix in it; the rest is uniform
    size_power: float = 1.0  # a client weighs nᵖ
    sharpness: float = 1.0
    kin_mixes: bool = False
    offsets: bool = True

    def lesson(self, frame: Frame, drawn: Tensor) -> Lesson:
        sizes = frame.clients.sizes["train"][frame.known] ** self.size_power
        evidence = self.sharpness * self.pool(frame.decisions[frame.known], sizes)
        mixes = mixes_by_kin(frame, drawn) if self.kin_mixes else frame.mixes[drawn]
        attention = self.attention * mixes + (1 - self.attention) / mixes.shape[1]
        targets = (evidence + attention.log()[:, None]).softmax(2)
        trust = self.trust(frame, drawn, targets) if self.trust else 1.0
        return Lesson(targets, attention, mixes, trust)


def omniscient(clients: Clients) -> Callable[[Tensor, Tensor], Tensor]:
    """A bound, no method: the evidence of one network trained on all clients' samples."""
    positions = clients.positions["train"][clients.is_sample("train")]
    generator = torch.Generator().manual_seed(stream_key(clients.experiment.seed, "central"))
    weights = [w[:1] for w in initial(clients)]
    for _ in range(CENTRAL_STEPS):
        batch = positions[torch.randint(len(positions), (64,), generator=generator)]
        weights = [w.requires_grad_() for w in weights]
        loss = cross_entropy(forward(weights, clients.x[batch][None])[0], clients.y[batch])
        gradients = torch.autograd.grad(loss, weights)
        weights = [(w - 0.1 * g).detach() for w, g in zip(weights, gradients, strict=True)]
    said = forward(weights, clients.public[None])[0].softmax(1)
    return lambda decisions, samples: mean_opinion(said[None], torch.ones(1))


def spoken_mixes(decisions: Tensor) -> Tensor:
    spoken = decisions.mean(1) + SMALLEST_SHARE / 10
    return spoken / spoken.sum(1, keepdim=True)


def mean_opinion(decisions: Tensor, samples: Tensor) -> Tensor:
    """The mean of what clients say, divided by the mean of their mixes."""
    share = samples / samples.sum()
    opinion = torch.einsum("m,mpn->pn", share, decisions) / (share @ spoken_mixes(decisions))
    return opinion.clamp(min=1e-6).log()


def mixture_of_experts(decisions: Tensor, samples: Tensor) -> Tensor:
    """A client weighs the more in x, the more of its samples are of the classes that x may have,
    by what all of them together say about x: the fixed point of that."""
    mixes, opinion = spoken_mixes(decisions), uniform(*decisions.shape[1:])
    everybodys = samples @ mixes / samples.sum()
    for _ in range(20):
        expertise = samples[:, None] * (mixes @ opinion.T)
        pooled = torch.einsum("mp,mpn->pn", expertise / expertise.sum(0), decisions) / everybodys
        opinion = pooled / pooled.sum(1, keepdim=True)
    return opinion.clamp(min=1e-6).log()


def log_likelihood(counts: Tensor, parameters: Tensor) -> Tensor:
    """Of label counts, by the parameters of the Dirichlet law that their mix comes from."""
    total = parameters.sum(-1)
    each = torch.lgamma(parameters + counts) - torch.lgamma(parameters)
    return torch.lgamma(total) - torch.lgamma(total + counts.sum(-1)) + each.sum(-1)


def mix_around(counts: Tensor, around: Tensor) -> Tensor:
    """``label_mix`` of many clients, under Dirichlet laws around other mixes than the uniform."""
    parameters = torch.tensor(concentrations(10))[:, None, None] * around
    means = (parameters + counts) / (parameters + counts).sum(2, keepdim=True)
    return (log_likelihood(counts, parameters).softmax(0)[..., None] * means).sum(0)


def mixes_by_kin(frame: Frame, drawn: Tensor) -> Tensor:
    """Label mixes around those of clients whose mix would make the own counts likely."""
    counts, mixes = frame.clients.counts[drawn], frame.decisions.mean(1)
    likely = log_likelihood(counts[:, None], 10 * mixes + 0.1)
    likely = likely.masked_fill(~frame.others(drawn), -torch.inf)
    return mix_around(counts, 0.8 * likely.softmax(1) @ mixes + 0.2 / mixes.shape[1])


# ----------------------------------------------------------------------- training


@dataclass(frozen=True)
class Trained:
    weights: Weights
    mixes: Tensor
    spoken: list[Tensor]  # what those drawn said after each round

    def __call__(self, x: Tensor) -> Tensor:
        return forward(self.weights, x) + self.mixes.log()[:, None]


def initial(clients: Clients) -> Weights:
    """The same for all clients."""
    generator = torch.Generator().manual_seed(stream_key(clients.experiment.seed, "initial"))
    weights: Weights = []
    for rows, columns in ((clients.x.shape[1], HIDDEN), (HIDDEN, clients.classes)):
        layer = (2 * torch.rand(rows, columns, generator=generator) - 1) / rows**0.5
        weights += [layer.repeat(clients.count, 1, 1), torch.zeros(clients.count, 1, columns)]
    return weights


def forward(weights: Weights, x: Tensor) -> Tensor:
    first, first_bias, second, second_bias = weights
    hidden = torch.baddbmm(first_bias, x, first).relu()
    return torch.baddbmm(second_bias, hidden, second)


def train(
    clients: Clients, idea: Idea, rounds: list[Draw], witnesses: Trained | None = None
) -> Trained:
    weights = initial(clients)
    mixes = uniform(*clients.counts.shape)
    if idea.offsets:
        mixes = torch.stack([label_mix(counts) for counts in clients.counts])
    first = rounds[0].clients  # they have told the server what they say untrained
    known = torch.zeros(clients.count, dtype=torch.bool)
    known[first] = True
    frame = Frame(clients, mixes, decisions(clients, weights, mixes), known, first)
    spoken = []
    for frame.round, draw in enumerate(rounds):
        drawn = draw.clients
        lesson = idea.lesson(frame, drawn)
        trained = sgd(clients, idea, lesson, [w[drawn] for w in weights], draw)
        for all_clients, some in zip(weights, trained, strict=True):
            all_clients[drawn] = some
        frame.mixes[drawn] = lesson.mixes
        spoken.append(decisions(clients, trained, lesson.mixes))
        heard = witnesses.spoken if idea.first_hand and witnesses else spoken
        frame.decisions[drawn] = heard[frame.round]
        frame.known[drawn], frame.last = True, drawn
    return Trained(weights, frame.mixes, spoken)


def decisions(clients: Clients, weights: Weights, mixes: Tensor) -> Tensor:
    x = clients.public.expand(len(mixes), -1, -1)
    return (forward(weights, x) + mixes.log()[:, None]).softmax(2)


def sgd(clients: Clients, idea: Idea, lesson: Lesson, weights: Weights, draw: Draw) -> Weights:
    students = torch.arange(len(draw.clients))[:, None]
    for private, public in zip(draw.private, draw.public, strict=True):
        weights = [w.requires_grad_() for w in weights]
        logits = forward(weights, clients.x[private]) + lesson.mixes.log()[:, None]
        y = clients.y[private]
        loss = cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / y.shape[1]
        if idea.weight:
            said = forward(weights, clients.public[public]) + lesson.attention.log()[:, None]
            target = lesson.targets[students, public]
            distance = idea.distance(said, target)
            if idea.by_content:
                distance = distance * (target - lesson.attention[:, None]).square().sum(2)
            loss = loss + idea.weight * (lesson.trust * distance.mean(1)).sum()
        gradients = torch.autograd.grad(loss, weights)
        rate = clients.experiment.training.learning_rate
        weights = [(w - rate * g).detach() for w, g in zip(weights, gradients, strict=True)]
    return weights


# ----------------------------------------------------------------------- the screening

SPEAKERS = "least squares: who speaks"
LEAST_SQUARES = Evidence()
# What the gates decide about: PerFed-Evidence's student.
TAUGHT = Evidence(weight=2, distance=divergence, first_hand=True)
IDEAS: dict[str, dict[str, Idea]] = {
    "PerFed-CKT's server, c=3, λ=2": {
        "as printed": Opinions(2, offsets=False),
        "c by silhouette, 1 to 5": Opinions(2, offsets=False, server=by_silhouette),
        "λ_k by the client's samples": Opinions(2, offsets=False, trust=by_noise),
        "λ_k by its samples and its distance from the centroid": Opinions(
            2, offsets=False, trust=by_noise_and_distance
        ),
        "label mixes as offsets": Opinions(2),
        "label mixes as offsets, c by silhouette": Opinions(2, server=by_silhouette),
    },
    "offsets, and a teacher of its own for each client: others by likeness, λ=2": {
        "temperature 0.1": Opinions(2, server=partial(by_kin, temperature=0.1)),
        "temperature 0.3": Opinions(2, server=partial(by_kin, temperature=0.3)),
    },
    "offsets, and one teacher without a mix for all, λ=4: how opinions are pooled": {
        "mean, divided by the mean mix": Evidence(pool=mean_opinion),
        "mixture of experts": Evidence(pool=mixture_of_experts),
        "least squares of log-ratios": LEAST_SQUARES,
    },
    "least squares, λ=4: the mix that clients listen under": {
        "own": Evidence(attention=1),
        "half own, half uniform": LEAST_SQUARES,
        "uniform": Evidence(attention=0),
    },
    "least squares, λ=4: a client's weight": {
        "1": Evidence(size_power=0),
        "√n": Evidence(size_power=0.5),
        "n": LEAST_SQUARES,
    },
    "least squares: how it is taught": {
        "λ=2": Evidence(weight=2),
        "λ=4": LEAST_SQUARES,
        "λ=8": Evidence(weight=8),
        "KL instead of squares, λ=3": Evidence(weight=3, distance=divergence),
        "teacher sharpened ×1.5, λ=4": Evidence(sharpness=1.5),
        "teacher softened ×0.7, λ=4": Evidence(sharpness=0.7),
        "λ_k by the client's samples, λ=4": Evidence(trust=by_noise),
        "λ_k by its samples and its distance from the teacher, λ=4": Evidence(
            trust=by_noise_and_distance
        ),
        "samples weighted by what the teacher says, λ=8": Evidence(weight=8, by_content=True),
        "samples weighted by what the teacher says, λ=16": Evidence(weight=16, by_content=True),
        "label mixes around those of kin, λ=4": Evidence(kin_mixes=True),
    },
    SPEAKERS: {
        "those who are taught, λ=8": Evidence(weight=8),
        "models trained alone, λ=8": Evidence(weight=8, first_hand=True),
        "those who are taught, KL λ=2": Evidence(weight=2, distance=divergence),
        "models trained alone, KL λ=2": TAUGHT,
        "models trained alone, KL λ=1": Evidence(1, divergence, first_hand=True),
        "models trained alone, KL λ=4": Evidence(4, divergence, first_hand=True),
    },
}
REFERENCES = "without any transfer"
GATES = "models trained alone speak, KL λ=2: who uses the taught model, and who one trained alone"
# Of the rule by wins: what everybody's wins count for, and the shares of wins that are enough.
STRENGTH, ENOUGH, ENOUGH_UNSEEN = 2, 2 / 3, 0.9


def pooled_wins(wins: Tensor, losses: Tensor) -> Tensor:
    share = (wins.sum() + 1) / (wins.sum() + losses.sum() + 2)
    own = (wins + STRENGTH * share) / (wins + losses + STRENGTH)
    return torch.where(wins == losses, share > ENOUGH_UNSEEN, (wins > losses) & (own > ENOUGH))


# By each client's disagreements of the two models on validation samples.
RULES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "always the taught one": lambda wins, losses: wins >= 0,
    "more wins than losses": lambda wins, losses: wins > losses,
    "no fewer wins than losses": lambda wins, losses: wins >= losses,
    "wins, with everybody's as prior": pooled_wins,
}
CAUTIONS = {
    "a mixture, by everybody's likelihoods and its own, caution 0": 0.0,
    "caution 3 (PerFed-Evidence)": 3.0,
    "caution 8": 8.0,
}
BOUND = "the better of the two on the test samples (a bound for choosing one, no method)"


def log_likelihoods(clients: Clients, judge: Callable[[Tensor], Tensor]) -> Tensor:
    """Of each client's validation samples, (K, largest part), none below log FLOOR."""
    where = clients.positions["validation"]
    said = judge(clients.x[where]).softmax(2)
    return (said.gather(2, clients.y[where][..., None])[..., 0] + FLOOR).log()


def mixture(
    taught: Trained, alone: Trained, shares: Tensor, sharpness: Tensor
) -> Callable[[Tensor], Tensor]:
    def judge(x: Tensor) -> Tensor:
        evidence = sharpness[:, None, None] * forward(taught.weights, x)
        student = (evidence + taught.mixes.log()[:, None]).softmax(2)
        share = shares[:, None, None]
        return ((1 - share) * alone(x).softmax(2) + share * student).log()

    return judge


def by_likelihood(clients: Clients, taught: Trained, alone: Trained) -> dict[str, Tensor]:
    """Accuracies of PerFed-Evidence's mixtures, with more and more caution."""
    everybody, sizes = torch.ones(clients.count), clients.sizes["validation"]
    own = log_likelihoods(clients, alone)
    gains = torch.zeros(clients.count, len(SHARPNESS), len(SHARES))
    for i, beta in enumerate(SHARPNESS):
        for j, share in enumerate(SHARES):
            judge = mixture(taught, alone, share * everybody, beta * everybody)
            gain = (log_likelihoods(clients, judge) - own) * clients.is_sample("validation")
            gains[:, i, j] = gain.sum(1) / sizes
    proof = gains * sizes[:, None, None] + PRIOR_SAMPLES * gains.mean(0)
    accuracies = {}
    for name, caution in CAUTIONS.items():
        chosen = [choice(of_client, caution) for of_client in proof]
        shares, sharpness = (torch.stack(column) for column in zip(*chosen, strict=True))
        accuracies[name] = clients.accuracy(mixture(taught, alone, shares, sharpness))
    return accuracies


Accuracies = dict[tuple[str, str], Tensor]  # by group and idea, of each client, in percent


def references(clients: Clients, alone: Trained) -> Accuracies:
    again = train(clients, Idea(), draws(clients, "other batches"))
    always = train(clients, Idea(), draws(clients, everybody=True))
    models: dict[str, Callable[[Tensor], Tensor]] = {
        "local": alone,
        "local, other mini-batches": again,
        "local, everybody in every round": always,
        "majority": lambda x: clients.counts[:, None].expand(-1, x.shape[1], -1),
    }
    return {(REFERENCES, name): clients.accuracy(model) for name, model in models.items()}


def gates(clients: Clients, taught: Trained, alone: Trained) -> Accuracies:
    right, right_alone = (clients.correct("validation", model) for model in (taught, alone))
    wins, losses = (right & ~right_alone).sum(1), (right_alone & ~right).sum(1)
    on_test, on_test_alone = clients.accuracy(taught), clients.accuracy(alone)
    found = {
        name: torch.where(rule(wins, losses), on_test, on_test_alone)
        for name, rule in RULES.items()
    }
    found |= by_likelihood(clients, taught, alone)
    found[BOUND] = torch.maximum(on_test, on_test_alone)
    return {(GATES, name): accuracy for name, accuracy in found.items()}


def screen(clients: Clients) -> Accuracies:
    rounds = draws(clients)
    alone = train(clients, Idea(), rounds)
    different = {idea for group in IDEAS.values() for idea in group.values()}
    trained = {idea: train(clients, idea, rounds, witnesses=alone) for idea in different}
    tried = {
        (group, name): clients.accuracy(trained[idea])
        for group, ideas in IDEAS.items()
        for name, idea in ideas.items()
    }
    bound = train(clients, replace(TAUGHT, pool=omniscient(clients)), rounds)
    tried[SPEAKERS, "one trained on everybody's data (a bound, no method), KL λ=2"] = (
        clients.accuracy(bound)
    )
    return references(clients, alone) | tried | gates(clients, trained[TAUGHT], alone)


def rows(setting: str) -> Iterator[dict[str, Any]]:
    values = DIGITS | {"partition": SETTINGS[setting]}
    federations = [
        Clients(from_mapping(Experiment, values | {"seed": seed})) for seed in TUNING_SEEDS
    ]
    found = [screen(clients) for clients in federations]
    small = torch.cat([clients.sizes["train"] for clients in federations]) < SMALL
    accuracy = {key: torch.cat([one[key] for one in found]) for key in found[0]}
    for (group, idea), of_clients in accuracy.items():
        gain = of_clients - accuracy[REFERENCES, "local"]
        yield {
            "group": group,
            "idea": idea,
            "setting": setting,
            "accuracy": round(of_clients.mean().item(), 2),
            "gain": round(gain.mean().item(), 2),
            "gain_small": round(gain[small].mean().item(), 2),
            "harmed": round((gain < -HARM).float().mean().item(), 4),
            "clients": len(gain),
            "small": int(small.sum()),
        }


def main() -> None:
    torch.set_num_threads(1)
    origin = environment(torch.device("cpu"))
    found = []
    for setting in SETTINGS:
        began = time.perf_counter()
        found += list(rows(setting))
        print(f"{setting}: {time.perf_counter() - began:.0f} s", flush=True)
    record = {
        "config": DIGITS,
        "settings": SETTINGS,
        "seeds": TUNING_SEEDS,
        "environment": origin,
        "rows": found,
    }
    path = ROOT / "benchmarks" / "results" / "screening.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    main()
