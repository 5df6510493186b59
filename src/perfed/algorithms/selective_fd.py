"""Selective-FD (Shao et al. 2024): clients and server drop public samples they know too little of.

Shao, Wu, Zhang: *Selective knowledge sharing for privacy-preserving federated distillation without
a good teacher*, Nature Communications 15, 2024. All learn from the mean of soft decisions on public
samples, but two selectors stand before it:

- **At a client**: a public sample that is unlike the client's own is none of its business. The
  client estimates how much denser its own samples lie there than points spread evenly,
  p_k(x) / q(x), and speaks of x only if that ratio is above the first quartile of the ratios of its
  own samples.
- **At the server**: the mean over the clients that speak of x is passed on only if it is precise.
  It is ambiguous where its entropy is high, and where nobody speaks.

The estimator is KuLSIF (kernel unconstrained least-squares importance fitting), as in the authors'
code: Gaussian kernels, 250 points drawn evenly from the box of values, λ = 1/√250. With own samples
z_1 … z_n, points a_1 … a_250, and K = k(a, a):

    r(x) = 1/λ mean_j ( k(x, z_j) − k(x, a) (K + 250 λ I)⁻¹ k(a, z_j) ).

In a round a client distils from the mean, trains on its own data, chooses and sends: the cycle of
the authors' code, which trains first. In the first round there is nothing to distil from. The mean
is over the clients of the last round; the paper has all clients in every round. A client's choice
crosses as a mask. The rows of the others say 1/N for every class, which tells nothing.

Where it differs from the paper or from the authors' code:

- Their estimator looks at pixels (MNIST) or, as they advise for other pictures, at what a network
  trained elsewhere makes of them. Here it looks at the features of the client's own network as it
  is, with one scale for all of them: the mean and spread of the public samples'. Where the network
  is one linear layer, these are the pixels.
- Their kernel has a width of 5 for 784 pixels. The option is that width per square root of the
  number of features, so that the default is theirs.
- They fit on 5 % of the client's samples and take the quartile of the others. Clients here may have
  ten samples: each is judged by the others (leave one out), at most 500 of them. A client with one
  sample has nothing to judge by, and speaks of nothing.
- Their code multiplies by the matrix above where the formula has its inverse. Here it is solved.
- Ambiguous is what has high entropy, says the paper. Its threshold could not be checked, and the
  public code has no such selector. The default here is ours: half of the entropy of knowing
  nothing.
- A client could send the rows of its chosen samples only. Here all rows are sent, and the mask.
- They make 10 steps on one mini-batch of 512. Here each step has a mini-batch of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from perfed.core.declaration import PROBABILITIES, Array, Maybe, Messages, Range
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.streams import numpy_stream
from perfed.core.tree import Tree

AUXILIARY = 250  # points spread evenly
RIDGE = AUXILIARY**-0.5  # λ of the estimator
MOST_OWN = 500  # samples that the estimator looks at: it compares all pairs


@dataclass(frozen=True)
class Choices(Range):
    """Yes or no."""

    dtype = torch.bool

    def words(self) -> str:
        return "times yes or no"


@algorithms.register("selective-fd")
@dataclass(frozen=True)
class SelectiveFD(Algorithm):
    digest_steps: int = option(10, "distillation steps a round, before the private ones", ge=0)
    quantile: float = option(
        0.25, "share of its own samples that a client would not find like its own", ge=0, le=1
    )
    ambiguity: float = option(
        0.5, "most entropy of a mean that is passed on; 1: that of knowing nothing", ge=0, le=1
    )
    width: float = option(
        5 / 28, "of the Gaussian kernel, per square root of the number of features", gt=0
    )

    sends = "outputs on public samples"
    not_private = "chooses what it sends by features of its samples, which no noise covers"
    needs_public_set = trains_on_public_set = needs_features = True

    def messages(self) -> Messages:
        decisions, choices = Array(("P", "N"), PROBABILITIES), Array(("P",), Choices())
        return Messages(
            up={"soft_decisions": decisions, "chosen": choices},
            down={"ensemble": Maybe(decisions), "precise": Maybe(choices)},
            evaluation={},
        )

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(**state)

    def client_round(self, client: Client, message: Message) -> Message:
        lesson = [message["ensemble"], message["precise"]] if "ensemble" in message else []
        client.weights = learn(client, client.weights, self.digest, lesson, self.digest_steps)
        said, chosen = client.soft_decisions(), self.chosen(client)
        nothing = torch.full_like(said, 1 / said.shape[1])
        return Message(soft_decisions=torch.where(chosen[:, None], said, nothing), chosen=chosen)

    def digest(
        self, model: Network, private: Private, public: Public, ensemble: Tensor, precise: Tensor
    ) -> Tensor:
        """The divergence from the mean, over the samples of a mini-batch that were passed on."""
        said, taught = model.public(public.x), ensemble[public.index]
        losses = cross_entropy(said, taught, reduction="none")
        counts = precise[public.index].to(losses.dtype)
        return (losses * counts).sum() / counts.sum().clamp(min=1)

    def chosen(self, client: Client) -> Tensor:
        """Which public samples lie where the client's own do."""
        same = client.weights._replace(public_buffers={})  # one BatchNorm for both
        public = client.features(same, on="public").double()
        own = client.features(same, on="train").double()[:MOST_OWN]
        if len(own) < 2:
            return torch.zeros(len(public), dtype=torch.bool, device=public.device)
        scale = public.std().clamp(min=torch.finfo(torch.float32).tiny)
        public, own = (public - public.mean()) / scale, (own - public.mean()) / scale
        width = self.width * math.sqrt(public.shape[1])
        points = spread_evenly(public)
        among = density_ratios(own, own, points, width)
        others = (among.sum(1) - among.diagonal()) / (len(own) - 1)
        there = density_ratios(public, own, points, width).mean(1)
        return there > others.quantile(self.quantile)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        said = torch.stack([reply.message["soft_decisions"] for reply in replies])
        chosen = torch.stack([reply.message["chosen"] for reply in replies])
        return passed_on(said, chosen, self.ambiguity)

    def describe(self, before: Tree, state: Tree) -> dict[str, Any]:
        """The share of public samples that clients will learn from."""
        return {"precise": float(state["precise"].double().mean())}


def spread_evenly(values: Tensor) -> Tensor:
    """Points of a box that has these values, the same for every client and round."""
    random = numpy_stream(0, "selective-fd/auxiliary").random((AUXILIARY, values.shape[1]))
    low, high = values.min(), values.max()
    return low + (high - low) * torch.from_numpy(random).to(values)


def density_ratios(x: Tensor, own: Tensor, points: Tensor, width: float) -> Tensor:
    """What each of a client's samples adds to the ratio at each ``x``; their mean is the ratio."""

    def kernel(left: Tensor, right: Tensor) -> Tensor:
        squared = torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist").square()
        return (squared / (-2 * width**2)).exp()

    unit = torch.eye(len(points), dtype=points.dtype, device=points.device)
    system = kernel(points, points) + len(points) * RIDGE * unit
    solved = torch.linalg.solve(system, kernel(points, own))
    ratios: Tensor = (kernel(x, own) - kernel(x, points) @ solved) / RIDGE
    return ratios


def passed_on(said: Tensor, chosen: Tensor, ambiguity: float) -> Tree:
    """The mean of soft decisions (m, |P|, N) over the clients that chose each sample (m, |P|), and
    which samples are precise; the others' rows are uniform."""
    classes = said.shape[2]
    speakers = chosen.sum(0)
    total = (said * chosen[..., None]).sum(0)
    mean = total / speakers.clamp(min=1)[:, None]
    entropy = torch.special.entr(mean).sum(1) / math.log(classes)
    precise = (speakers > 0) & (entropy.clamp(max=1) <= ambiguity)
    nothing = torch.full_like(mean, 1 / classes)
    return {"ensemble": torch.where(precise[:, None], mean, nothing), "precise": precise}
