"""FedMD (Li and Wang 2019): clients digest the mean of their logits, then revisit their own data.

Li, Wang: *FedMD: Heterogenous Federated Learning via Model Distillation*. All send their logits on
the public set; the plain mean is the consensus. In a round a client first learns to say what the
consensus says (digest), then trains on its own samples (revisit), then sends its logits.

Which variant, and what differs from the paper and its authors' code:

* Digest is the mean absolute error between logits, over samples and classes, as in their code
  (Keras' ``mean_absolute_error`` on a network without its softmax). It is neither MSE nor KL.
* Before the first round they train each network on the *labelled* public set, then on its private
  data. Our public set has no labels, so only the second half is here: a client that takes part for
  the first time makes ``warmup_steps`` on its own samples. Theirs are 25 epochs, which are 25 steps
  with the 18 samples a client has in their CIFAR experiment.
* In the first round there is no consensus yet. Clients send one after it.
* Their server draws 5,000 public samples each round. Here all of the public set is used.
* All their clients take part in every round. Here the consensus is of those of the last round.
* Steps of the digest: as many as of the revisit. Theirs are one epoch and four, some 20 and 16
  steps in the same experiment. They use Adam; ``training.optimizer`` decides here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from perfed.algorithms.lessons import first_hand, learn
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
from perfed.core.declaration import REALS, Array, Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree


@algorithms.register("fedmd")
@dataclass(frozen=True)
class FedMD(Algorithm):
    distil_steps: int | None = option(
        None, "steps a round on the consensus; null: as many as on private samples", ge=0
    )
    warmup_steps: int = option(
        25, "steps on private samples when a client takes part for the first time", ge=0
    )

    sends = "outputs on public samples"
    needs_public_set = trains_on_public_set = merges_by_mean = True

    def messages(self) -> Messages:
        logits = Array(("P", "N"), REALS)
        return Messages(up={"logits": logits}, down={"consensus": Maybe(logits)}, evaluation={})

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        return {"consensus": torch.stack([reply.message["logits"] for reply in replies]).mean(0)}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(**state)

    def client_round(self, client: Client, message: Message) -> Message:
        consensus = [message["consensus"]] if "consensus" in message else []
        warmup = 0 if client.state else self.warmup_steps
        warm = client.sgd(client.weights, first_hand, steps=warmup, stream=2)
        client.weights = learn(client, warm, digest, consensus, self.distil_steps)
        client.state = {"warm": torch.ones(1, dtype=torch.bool)}
        return Message(logits=client.logits())


def digest(model: Network, private: Private, public: Public, consensus: Tensor) -> Tensor:
    return l1_loss(model.public(public.x), consensus[public.index])
