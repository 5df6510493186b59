"""SCARLET (Azuma et al. 2025): DS-FL with a cache of soft labels, so that few of them cross.

Azuma, Nishio, Kitagawa, Nakano, Tanimura: *Soft-Label Caching and Sharpening for
Communication-Efficient Federated Distillation*. Each round is about some public samples, which the
server draws. Of those whose mean label is younger than D rounds, the server and the clients have
the label in their caches, and nothing crosses. Of the others, clients send their class
probabilities. The server sharpens the plain mean by Enhanced ERA, meanᵝ / Σ meanᵝ, and keeps it.
In the next round it sends each client those labels that the client does not hold. A client imitates
all labels of the round on public samples, trains on its own samples, and answers.

Which variant, and what differs from the paper and its authors' code:

* They draw 1,000 of 10,000 public samples a round. Here it is the same share of the public set.
* Where a label has expired, a new one is made and kept at once. In their code it is used once, and
  kept only when the sample is drawn again.
* They send a signal for each sample of a round and, to clients that have missed rounds, a package
  to catch up. Here the server knows what a client held when it last answered, and sends what is
  missing of the round's labels: both in one. A lost answer costs bytes and no label.
* Public mini-batches come from all of the public set. The loss looks at those samples only that the
  round is about, and is their mean, KL(label ‖ student) over samples and not over classes.
* Steps on public samples: as many as on private ones. Theirs are five epochs on either.
* Their server also trains a model of its own. No client ever sees it, so it is left out.
* The defaults β = 2 and D = 50 are those of their code; they choose β for each experiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.algorithms.lessons import learn
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Network,
    Private,
    Public,
    Reply,
    Server,
    algorithms,
)
from perfed.core.declaration import (
    PROBABILITIES,
    Array,
    Known,
    Maybe,
    Messages,
    Probabilities,
    Range,
)
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree

NEVER = -1  # the round of a label that has not been made


@algorithms.register("scarlet")
@dataclass(frozen=True)
class Scarlet(Algorithm):
    exponent: float = option(2.0, "sharpening of the mean label; 1: none", symbol="β", ge=0)
    duration: int = option(
        50, "rounds before a cached label is asked for again; 0: no cache", symbol="D", ge=0
    )
    share: float = option(0.1, "public samples that a round is about, of all", gt=0, le=1)
    distil_steps: int | None = option(
        None, "steps a round on public samples; null: as many as on private ones", ge=0
    )

    sends = "outputs on public samples"
    needs_public_set = trains_on_public_set = True

    def messages(self) -> Messages:
        """R samples are wanted, L have been taught, and of these the client lacks U labels."""
        return Messages(
            up={"soft_labels": Array(("R", "N"), AsWanted())},
            down={
                "wanted": Array(("R",), Samples()),
                "taught": Maybe(Array(("L",), Samples())),
                "new": Maybe(Array(("U",), Samples())),
                "labels": Maybe(Array(("U", "N"), PROBABILITIES)),
            },
            evaluation={},
        )

    # The server. It keeps each sample's label and the round it was made in; which samples the
    # last merge was about (taught), and the next one is (drawn), and what clients must send
    # (wanted); and for each client the rounds of the labels it holds.

    def start(self, server: Server) -> Tree:
        made = torch.full((len(server.public_x),), NEVER, dtype=torch.int32)
        return {"made": made, **self.next_samples(server, made)}

    def next_samples(self, server: Server, made: Tensor) -> Tree:
        """What the next round is about."""
        number = max(1, round(self.share * len(made)))
        choice = server.random("public-samples").choice(len(made), number, replace=False)
        drawn = torch.from_numpy(choice).sort().values.to(made.device)
        fresh = (made[drawn] != NEVER) & (made[drawn] + self.duration > server.round + 1)
        return {"drawn": drawn.int(), "wanted": drawn[~fresh].int()}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        if "taught" not in state:
            return Message(wanted=state["wanted"])
        taught, held = state["taught"], state.get("held", {}).get(str(client.id))
        lacking = taught if held is None else taught[(held != state["made"])[taught.long()]]
        labels = state["labels"][lacking.long()]
        return Message(wanted=state["wanted"], taught=taught, new=lacking, labels=labels)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        mean = torch.stack([reply.message["soft_labels"] for reply in replies]).mean(0)
        wanted, made = state["wanted"].long(), state["made"].clone()
        labels = state.get("labels", mean.new_zeros(len(made), mean.shape[1])).clone()
        labels[wanted] = sharpened(mean, self.exponent).to(labels)
        made[wanted] = server.round
        return {
            "labels": labels,
            "made": made,
            "taught": state["drawn"],
            "held": self.now_held(state, replies),
            **self.next_samples(server, made),
        }

    def now_held(self, state: Tree, replies: Sequence[Reply]) -> Tree:
        """An answer says that its client has got what it was sent."""
        held = dict(state.get("held", {}))
        if "taught" in state:
            taught = state["taught"].long()
            for name in (str(reply.client.id) for reply in replies):
                rounds = held.get(name, torch.full_like(state["made"], NEVER)).clone()
                rounds[taught] = state["made"][taught]
                held[name] = rounds
        return held

    # One client. Its cache is a label for each public sample, of zeros where it has none.

    def client_round(self, client: Client, message: Message) -> Message:
        lesson = []
        if "taught" in message:
            labels = message["labels"]
            cache = client.state.get("cache")
            cache = torch.zeros_like(client.logits()) if cache is None else cache.clone()
            cache[message["new"].long()] = labels.to(cache)
            about = cache.new_zeros(len(cache))
            about[message["taught"].long()] = 1
            client.state = {"cache": cache}
            lesson = [cache, about]
        client.weights = learn(client, client.weights, imitate_some, lesson, self.distil_steps)
        return Message(soft_labels=client.soft_decisions()[message["wanted"].long()])


def sharpened(mean: Tensor, exponent: float) -> Tensor:
    """Enhanced ERA, of each row; first divided by its largest, so that no power vanishes."""
    powers = (mean / mean.amax(1, keepdim=True)) ** exponent
    return powers / powers.sum(1, keepdim=True)


def imitate_some(
    model: Network, private: Private, public: Public, labels: Tensor, about: Tensor
) -> Tensor:
    """KL(label ‖ student), up to the labels' entropy: the mean over those samples of the
    mini-batch that have a weight of one in ``about``; zero where there is none."""
    each = cross_entropy(model.public(public.x), labels[public.index], reduction="none")
    weights = about[public.index]
    return (weights * each).sum() / weights.sum().clamp(min=1)


@dataclass(frozen=True)
class Samples(Range):
    """Which public samples."""

    dtype = torch.int32

    def words(self) -> str:
        return "numbers of public samples"

    def holds(self, values: Tensor, known: Known) -> Tensor:
        return ((values >= 0) & (values < known.sizes["P"])).all()


@dataclass(frozen=True)
class AsWanted(Probabilities):
    """Probabilities of as many samples as the client was asked about."""

    def words(self) -> str:
        return "probabilities, a row for each sample that was wanted"

    def holds(self, values: Tensor, known: Known) -> Tensor:
        return super().holds(values, known) & (len(values) == self.wanted(known))

    def fault(self, values: Tensor, known: Known) -> str:
        if len(values) != self.wanted(known):
            return f"has {len(values)} rows, must be {self.wanted(known)}, as wanted"
        return super().fault(values, known)

    def wanted(self, known: Known) -> int:
        return len(known.received["wanted"]) if "wanted" in known.received else 0
