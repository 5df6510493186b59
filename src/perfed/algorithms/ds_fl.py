"""DS-FL (Itahara et al. 2021): clients learn from the sharpened mean of their soft decisions.

Itahara, Nishio, Koda, Morikura, Yamamoto: *Distillation-Based Semi-Supervised Federated Learning
for Communication-Efficient Collaborative Training with Non-IID Private Data*. In a round a client
first imitates the mean on public samples, then trains on its own samples, then sends its class
probabilities on the public set. The server takes their plain mean and sharpens it: entropy
reduction aggregation (ERA), softmax(mean / T). ``aggregation: simple`` leaves the mean as it is.

Which variant, and what differs from the paper:

* Their server draws some 1,000 of its open samples each round. Here the public set is about that
  small, and all of it is used.
* Their server also trains a model of its own on the sharpened mean. No client ever sees it, so it
  is left out; the clients' own models are evaluated.
* As in their first round, nobody has anything to imitate before the first merge.
* The loss is KL(mean ‖ student), averaged over samples and not over classes. It is written as
  cross-entropy, which has the same gradient.
* Steps on public samples: as many as on private ones. Theirs are five epochs on either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import softmax

from perfed.algorithms.lessons import imitate, learn
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Reply,
    Server,
    algorithms,
)
from perfed.core.declaration import PROBABILITIES, Array, Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree


@algorithms.register("ds-fl")
@dataclass(frozen=True)
class DSFL(Algorithm):
    temperature: float = option(
        0.1, "how much the mean is sharpened: the lower, the more", symbol="T", gt=0
    )
    aggregation: Literal["era", "simple"] = option(
        "era", "whether the mean is sharpened (entropy reduction) or left as it is"
    )
    distil_steps: int | None = option(
        None, "steps a round on public samples; null: as many as on private ones", ge=0
    )

    sends = "outputs on public samples"
    needs_public_set = trains_on_public_set = merges_by_mean = True

    def messages(self) -> Messages:
        decisions = Array(("P", "N"), PROBABILITIES)
        return Messages(
            up={"soft_decisions": decisions}, down={"teacher": Maybe(decisions)}, evaluation={}
        )

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        mean = torch.stack([reply.message["soft_decisions"] for reply in replies]).mean(0)
        return {"teacher": era(mean, self.temperature) if self.aggregation == "era" else mean}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(**state)

    def client_round(self, client: Client, message: Message) -> Message:
        lesson = [message["teacher"]] if "teacher" in message else []
        client.weights = learn(client, client.weights, imitate, lesson, self.distil_steps)
        return Message(soft_decisions=client.soft_decisions())


def era(mean: Tensor, temperature: float) -> Tensor:
    """Entropy reduction aggregation: a softmax of *probabilities*, so no class gets to zero."""
    return softmax(mean / temperature, dim=1)
