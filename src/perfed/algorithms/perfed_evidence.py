"""PerFed-Evidence: PerFed-CKT's frame, but clients pool evidence instead of opinions.

As in PerFed-CKT only soft decisions on a small unlabeled public set P cross the network, so every
client may have a model of its own. But a soft decision carries its sender's label mix: a client
that has seen cats only says "cat" to everything. Taught to others, that replaces their own mix, and
under label skew the student loses more than it learns. So the mix π is kept apart from what is
known about x:

- A client trains its logits z by cross-entropy of z + log π_k, and predicts with z + log π_k, where
  π_k is estimated from its own label counts. z is then evidence, log p(x | y) up to a constant.
- Its soft decisions s_k = softmax(z + log π_k), divided by their mean over P, q_k, compare the
  classes that the client has seen: log p(x | y) − log p(x | y'). Of others they say nothing. The
  server looks for the evidence ℓ(x, ·) that agrees with all clients' comparisons, each class of
  each client weighing as much as samples stand behind it, n_k q_k(y):

      minimise  Σ_k Σ_y n_k q_k(y) (log s_k(x, y) − log q_k(y) − c_k(x) − ℓ(x, y))²  over ℓ and c.

  That is one linear system in N unknowns, the same for all x. A client with one label has no
  weight in it, one with two ties these two together, and many such make a whole. The server
  remembers what every client sent last.
- ℓ is broadcast, one matrix for all. A client learns from it under a mix between its own and the
  uniform one, μ_k = (π_k + 1/N) / 2, so that it attends to its own classes:

      λ ‖softmax(z(x) + log μ_k) − softmax(ℓ(x) + log μ_k)‖².

- Beside this *taught* model a client trains one alone, on the same mini-batches, and uses the
  taught one only where there is reason to. Where the two disagree about a validation sample, one of
  them wins; a client tells the server how often either did, and the server tells all the share of
  the taught models' wins. That share counts for a client like two wins and losses of its own: a
  client with a handful of samples profits from what all others found. The accuracy on validation
  data is then no held-out evidence any more. ``keep_alone: false`` does without, for half the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax

from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Judged,
    Network,
    Private,
    Public,
    Reply,
    Server,
    Shifted,
    algorithms,
    supervised,
)
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree, combine

# Total concentrations of the Dirichlet laws a label mix may come from: nearly one label … uniform.
CONCENTRATIONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
# A probability below this is said with more certainty than a network of a few samples has.
SMALLEST_PROBABILITY = 1e-4
# Share of a client's weight that classes it never speaks of have; keeps logarithms and the linear
# system finite, and is far below one sample.
SMALLEST_SHARE = 1e-4
RIDGE = 1e-3
# What everybody found counts for a client like so many disagreements of its own.
PRIOR_STRENGTH = 2.0
# A client's share of wins must be above this for it to use the taught model, …
ENOUGH = 2 / 3
# … and the share among all clients above this where its own samples do not decide.
ENOUGH_UNSEEN = 0.9


@algorithms.register("perfed-evidence")
@dataclass(frozen=True)
class PerFedEvidence(Algorithm):
    weight: float = option(8.0, "weight of agreement with the pooled evidence", symbol="λ", ge=0)
    keep_alone: bool = option(
        True,
        "train a model alone too, and use the taught one where validation samples speak for it",
    )

    needs_public_set = trains_on_public_set = True

    def first_message(self, client: Client) -> Message:
        mix = label_mix(client.label_counts())
        return self.message(client, mix, contest=mix.new_zeros(2))

    def message(self, client: Client, mix: Tensor, contest: Tensor) -> Message:
        spoken = client.soft_decisions() * mix
        return Message(
            soft_decisions=spoken / spoken.sum(1, keepdim=True),
            samples=client.samples,
            contest=contest,
        )

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        bank = state.get("bank", {}) | {str(r.client.id): dict(r.message) for r in replies}

        def everybodys(name: str) -> Tensor:
            return torch.stack([sent[name] for sent in bank.values()])

        wins, losses = everybodys("contest").sum(0)
        return {
            "bank": bank,
            "evidence": pooled_evidence(everybodys("soft_decisions"), everybodys("samples")),
            "win_share": (wins + 1) / (wins + losses + 2),
        }

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(evidence=state["evidence"], win_share=state["win_share"])

    def client_round(self, client: Client, message: Message) -> Message:
        mix = label_mix(client.label_counts())
        attention = (mix + 1 / len(mix)) / 2
        teacher = softmax(message["evidence"] + attention.log(), dim=1)
        alone = client.state.get("alone", client.weights)
        client.weights = client.sgd(
            client.weights, self.objective, mix.log(), attention.log(), teacher, stream=0
        )
        contest = mix.new_zeros(2)
        if self.keep_alone:
            alone = client.sgd(alone, supervised, stream=0)
            taught = client.correct(Shifted(client.weights, mix.log()), "validation")
            untaught = client.correct(alone, "validation")
            contest = torch.stack([(taught & ~untaught).sum(), (untaught & ~taught).sum()]).to(mix)
            client.state = {"alone": alone, "taught": trusts(contest, message["win_share"])}
        return self.message(client, mix, contest)

    def objective(
        self,
        model: Network,
        private: Private,
        public: Public,
        log_mix: Tensor,
        log_attention: Tensor,
        teacher: Tensor,
    ) -> Tensor:
        loss = cross_entropy(model(private.x) + log_mix, private.y)
        if self.weight == 0:
            return loss
        student = softmax(model.public(public.x) + log_attention, dim=1)
        return loss + self.weight * (teacher[public.index] - student).square().sum(1).mean()

    def models(self, client: Client, message: Message) -> dict[str, Judged]:
        log_mix = label_mix(client.label_counts()).log()
        if "taught" not in client.state:
            return {"personal": Shifted(client.weights, log_mix)}
        taught = client.state["taught"]
        weights = combine(
            [client.weights, client.state["alone"]],
            lambda pair: torch.where(taught, pair[0], pair[1]),
        )
        return {"personal": Shifted(weights, torch.where(taught, log_mix, 0.0))}


def trusts(contest: Tensor, win_share: Tensor) -> Tensor:
    """Whether a client with these wins and losses uses the taught model."""
    wins, losses = contest
    own = (wins + PRIOR_STRENGTH * win_share) / (wins + losses + PRIOR_STRENGTH)
    return torch.where(wins == losses, win_share > ENOUGH_UNSEEN, (wins > losses) & (own > ENOUGH))


def label_mix(counts: Tensor) -> Tensor:
    """The label probabilities of a client that has these counts, none of them zero.

    The posterior mean under Dirichlet laws around the uniform mix, each concentration weighing as
    much as it makes the counts likely: five samples of one label speak for a client of one label,
    five of five labels for one that has them all.
    """
    counts = counts.double()
    classes, total = len(counts), counts.sum()
    concentration = torch.tensor(CONCENTRATIONS, dtype=counts.dtype, device=counts.device)
    base = (concentration / classes)[:, None]
    likelihood = (
        torch.lgamma(concentration)
        - torch.lgamma(concentration + total)
        + (torch.lgamma(base + counts) - torch.lgamma(base)).sum(1)
    )
    means = (base + counts) / (concentration + total)[:, None]
    return (likelihood.softmax(0)[:, None] * means).sum(0).to(torch.get_default_dtype())


def pooled_evidence(decisions: Tensor, samples: Tensor) -> Tensor:
    """ℓ, |P|×N with rows that sum to zero, from soft decisions (m, |P|, N) of m clients."""
    clients, _, classes = decisions.shape
    decisions = decisions.double()
    spoken = decisions.mean(1) + SMALLEST_SHARE
    spoken = spoken / spoken.sum(1, keepdim=True)  # q, (m, N)
    ratios = decisions.clamp(min=SMALLEST_PROBABILITY).log() - spoken.log()[:, None]
    weights = samples.to(spoken)[:, None] * spoken  # (m, N)
    # The best c_k(x) is the weighted mean of what is left over; put in, the sum over clients of
    # diag(w) − w wᵀ / Σw is the Laplacian of a graph of classes whose edges are the clients.
    ratios = ratios - (ratios * spoken[:, None]).sum(2, keepdim=True)
    laplacian = weights.sum(0).diag() - weights.T @ spoken
    ridge = RIDGE * weights.sum() / clients
    unit = torch.eye(classes, dtype=weights.dtype, device=weights.device)
    evidence = torch.linalg.solve(
        laplacian + ridge * unit, torch.einsum("mn,mpn->np", weights, ratios)
    ).T
    evidence = evidence - evidence.mean(1, keepdim=True)
    result: Tensor = evidence.to(torch.get_default_dtype())
    return result
