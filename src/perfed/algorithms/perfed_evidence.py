"""PerFed-Evidence: PerFed-CKT's frame, but clients pool evidence instead of opinions.

As in PerFed-CKT only soft decisions on a small unlabeled public set P cross the network, so every
client may have a model of its own. But a soft decision carries its sender's label mix: a client
that has seen cats only says "cat" to everything. Taught to others, that replaces their own mix, and
under label skew the student loses more than it learns. Four things are different here:

- **Witnesses speak first-hand.** A client has two models. The *witness* is trained on its own data
  only, exactly as in local training, and its soft decisions s_k are what is sent. The *student* is
  taught. So nobody repeats what it was told, and a teacher is as good as its witnesses from the
  beginning, not as its students, who are slow.
- **Evidence is pooled, not opinions.** Divided by their mean over P, q_k, soft decisions compare
  the classes that the witness has seen: log p(x | y) − log p(x | y'). Of others they say nothing.
  The server looks for the evidence ℓ(x, ·) that agrees with all witnesses' comparisons, each class
  of each client weighing as much as samples stand behind it, n_k q_k(y):

      minimise  Σ_k Σ_y n_k q_k(y) (log s_k(x, y) − log q_k(y) − c_k(x) − ℓ(x, y))²  over ℓ and c.

  That is one linear system in N unknowns, the same for all x. A client with one label has no
  weight in it, one with two ties these two together, and many such make a whole; a small ridge
  keeps classes that nobody ties near zero. The server remembers what every client sent last (of
  some that is what they said untrained), and broadcasts ℓ: one matrix for all.
- **A label mix is kept apart.** With π_k, estimated from its own label counts, a student's logits z
  are trained by cross-entropy of z + log π_k, so that z is evidence too; and it learns from ℓ under
  a mix between its own and the uniform one, μ_k = (π_k + 1/N) / 2, so that it attends to its own
  classes:

      λ KL(softmax(ℓ(x) + log μ_k) ‖ softmax(z(x) + log μ_k)).

- **A student must prove itself.** A client predicts with a mixture of its two models,

      (1 − w) softmax(witness) + w softmax(β z + log π_k),

  and chooses w and β by the likelihood of its validation samples. These may be two; so it tells
  the server how much each choice gained over the witness alone, and what all clients found, on
  average (nothing, where one has not trained yet), counts like PRIOR_SAMPLES samples of its own.
  The burden of proof is the student's: w has the prior e^(−caution · w), and w = 0 is local
  training. The accuracy on validation data is no held-out evidence any more, unless half of it is
  kept from the method (``split.second_validation``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax

from perfed.algorithms.lessons import first_hand
from perfed.algorithms.witnesses import Witnesses
from perfed.core.algorithm import (
    Adjusted,
    Algorithm,
    Client,
    ClientInfo,
    Mixture,
    Network,
    Parts,
    Predictor,
    Private,
    Public,
    Reply,
    Server,
    algorithms,
)
from perfed.core.declaration import (
    LOG_PROBABILITIES,
    PROBABILITIES,
    SAMPLES,
    Array,
    Messages,
    Reals,
)
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree, Weights

# The choices for β (a student may be too sure of what it was taught, or not sure enough) and w.
SHARPNESS = (0.5, 1.0, 1.5)
SHARES = (0.25, 0.5, 0.75, 1.0)
# No single sample may cost more than the logarithm of this: one mistake is one mistake.
FLOOR = 0.01
PRIOR_SAMPLES = 12.0
# No choice can gain or lose more than this on a sample, with a little for rounding.
LARGEST_GAIN = math.log((1 + FLOOR) / FLOOR) + 0.01


@algorithms.register("perfed-evidence")
@dataclass(frozen=True)
class PerFedEvidence(Algorithm):
    weight: float = option(2.0, "weight of agreement with the pooled evidence", symbol="λ", ge=0)
    caution: float = option(
        3.0,
        "how much better the taught model must explain a client's validation samples (in "
        "log-likelihood) before the client uses it alone",
        ge=0,
    )

    sends = "outputs on public samples"
    needs_public_set = trains_on_public_set = has_opening = True
    uses_validation = True

    def messages(self) -> Messages:
        gains = Array((len(SHARPNESS), len(SHARES)), Reals(-LARGEST_GAIN, LARGEST_GAIN))
        decisions = Array(("P", "N"), PROBABILITIES)
        return Messages(
            up={"soft_decisions": decisions, "samples": SAMPLES, "gains": gains},
            down={"evidence": Array(("P", "N"), LOG_PROBABILITIES), "gains": gains},
            evaluation={},
        )

    def first_message(self, client: Client) -> Message:
        return self.untried(client)

    def untried(self, client: Client) -> Message:
        """Of a client that has tried no student."""
        decisions = client.soft_decisions()
        none = decisions.new_zeros(len(SHARPNESS), len(SHARES))
        return Message(soft_decisions=decisions, samples=client.samples, gains=none)

    def message(self, client: Client, gains: Tensor) -> Message:
        return Message(soft_decisions=client.soft_decisions(), samples=client.samples, gains=gains)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        bank = state.get("bank", {}) | {str(r.client.id): dict(r.message) for r in replies}

        def everybodys(name: str) -> Tensor:
            return torch.stack([sent[name] for sent in bank.values()])

        # New ones are on the CPU; those of a state that was resumed are on its device.
        samples = torch.tensor([float(sent["samples"]) for sent in bank.values()])
        return {
            "bank": bank,
            "evidence": pooled_evidence(everybodys("soft_decisions"), samples),
            "gains": everybodys("gains").mean(0),
        }

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(evidence=state["evidence"], gains=state["gains"])

    def client_round(self, client: Client, message: Message) -> Message:
        mix = self.mix(client, message)
        attention = (mix + 1 / len(mix)) / 2
        teacher = softmax(message["evidence"] + attention.log(), dim=1)
        student = client.sgd(
            client.state.get("student", client.weights),
            Parts(labels_under_mix, self.lesson) if self.weight else labels_under_mix,
            mix.log(),
            attention.log(),
            teacher,
            stream=0,
        )
        client.weights = client.sgd(client.weights, first_hand, stream=0)
        gains, samples = trial(client, student, mix.log(), "validation")
        proof = gains * samples + PRIOR_SAMPLES * message["gains"]
        proof = proof + self.at_home(client, student, mix.log())
        client.state = {"student": student, "proof": proof, "mix": mix}
        return self.message(client, gains)

    def mix(self, client: Client, message: Message) -> Tensor:
        """The label probabilities that a client expects."""
        return label_mix(client.label_counts())

    def at_home(self, client: Client, student: Weights, log_mix: Tensor) -> Tensor | float:
        """What speaks for each choice beside validation samples and the other clients."""
        return 0.0

    def speak(self, client: Client, message: Message) -> Message:
        """Of a client whose messages are private only the witness speaks, and gains, which are of
        validation samples, are not told: who has not been taught tells none."""
        client.weights = client.sgd(client.weights, first_hand, stream=0)
        return self.untried(client)

    def lesson(
        self,
        model: Network,
        private: None,
        public: Public,
        log_mix: Tensor,
        log_attention: Tensor,
        teacher: Tensor,
    ) -> Tensor:
        said = model.public(public.x) + log_attention
        return self.weight * self.disagreement(said, teacher[public.index])

    def disagreement(self, said: Tensor, taught: Tensor) -> Tensor:
        """The divergence, up to the teacher's entropy, which no student can change."""
        return cross_entropy(said, taught)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"personal": self.personal(client, self.caution)}

    def personal(self, client: Client, caution: float) -> Predictor:
        if not client.state:  # not selected yet
            return client.weights
        share, sharpness = choice(client.state["proof"], caution)
        if float(share) == 0:
            return client.weights
        student = Adjusted(client.state["student"], sharpness, client.state["mix"].log())
        return Mixture((client.weights, student), torch.stack([1 - share, share]))


def labels_under_mix(
    model: Network, private: Private, public: Public, log_mix: Tensor, *rest: Tensor
) -> Tensor:
    """Cross-entropy of z + log π."""
    return cross_entropy(model(private.x) + log_mix, private.y)


def trial(client: Client, student: Weights, log_mix: Tensor, part: str) -> tuple[Tensor, int]:
    """How much the log-likelihood of a sample of a part gains by each choice of β and w, on
    average, and of how many samples."""
    sharpened = [Adjusted(student, beta, log_mix) for beta in log_mix.new_tensor(SHARPNESS)]
    alone, *sure = client.likelihoods([client.weights, *sharpened], part)
    taught = torch.stack(sure)
    shares = log_mix.new_tensor(SHARES)[:, None]
    mixed = (1 - shares) * alone + shares * taught[:, None]  # (β, w, sample)
    return ((mixed + FLOOR).log() - (alone + FLOOR).log()).mean(2), len(alone)


def choice(gains: Tensor, caution: float) -> tuple[Tensor, Tensor]:
    """The share and the sharpness with which a student is listened to, by the gain in
    log-likelihood of each choice; a share of zero where none is worth the burden of proof."""
    shares = gains.new_tensor(SHARES)
    worth = gains - caution * shares
    beta, w = torch.unravel_index(worth.argmax(), worth.shape)
    share = torch.where(worth.max() > 0, shares[w], 0.0)
    return share, gains.new_tensor(SHARPNESS)[beta]


def label_mix(counts: Tensor, base: Tensor | None = None) -> Tensor:
    """The label probabilities of clients that have these counts, none of them zero.

    The posterior mean under Dirichlet laws around ``base``, or the uniform mix, each concentration
    weighing as much as it makes the counts likely: five samples of one label speak for a client of
    one label, five of five labels for one that has them all.
    """
    counts = counts.double()[..., None, :]
    classes, total = counts.shape[-1], counts.sum(-1)
    base = torch.full_like(counts, 1 / classes) if base is None else base.to(counts)[..., None, :]
    concentration = counts.new_tensor(concentrations(classes))
    law = concentration[:, None] * base
    likelihood = (
        torch.lgamma(concentration)
        - torch.lgamma(concentration + total)
        + (torch.lgamma(law + counts) - torch.lgamma(law)).sum(-1)
    )
    means = (law + counts) / (concentration + total)[..., None]
    mix = (likelihood.softmax(-1)[..., None] * means).sum(-2)
    return mix.to(torch.get_default_dtype())


def concentrations(classes: int) -> list[float]:
    """Total concentrations of the Dirichlet laws a label mix may come from: from nearly one label,
    however many classes there are, to nearly uniform, ten for each class."""
    steps = (digit * 10**power / 10 for power in range(10) for digit in (1, 3))
    return [total for total in steps if total <= 10 * classes]


def pooled_evidence(decisions: Tensor, samples: Tensor) -> Tensor:
    """ℓ, |P|×N with rows that sum to zero, from soft decisions (m, |P|, N) of m clients."""
    return Witnesses.hear(decisions, samples).table().to(torch.get_default_dtype())
