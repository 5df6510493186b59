"""FD, federated distillation (Jeong et al. 2018): clients exchange class-mean soft decisions.

Paper: *Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation
under Non-IID Private Data*. A client sends, for each of its classes, the mean class probabilities
that its network gives to samples of that class. (The paper calls softmax outputs "logit vectors".)
A client learns its labels, and for each sample the mean row of its class that the *other* clients
sent: cross-entropy against probabilities, with weight γ. Networks may differ in everything.

Where this differs from the paper:

* The paper gives no value of γ. The default is that of HtFLlib.
* The paper averages outputs while it trains. Here a client's rows are of its trained network, in
  evaluation mode, on all its training samples.
* The paper's mean over clients is plain. Here a client counts as ``averaging`` says.
* The paper's clients all take part. Here the others are those that answered in the last round. A
  class that none of them has is not distilled.
* The paper's augmentation by a generative model (FAug) is a method of its own, and not here.

HtFLlib sends raw logits, and takes cross-entropy against them as if they were probabilities. Its
mean includes the client's own. Neither is done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.algorithms.class_means import KNOWN, class_means, present, received
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Network,
    Private,
    Reply,
    Server,
    algorithms,
    supervised,
)
from perfed.core.declaration import COUNTS, PROBABILITIES, Array, Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree


@algorithms.register("fd")
@dataclass(frozen=True)
class FD(Algorithm):
    weight: float = option(1.0, "weight of agreement with the other clients", symbol="γ", ge=0)

    sends = "class means"
    not_private = "sends means over its training samples, which no noise covers"

    def messages(self) -> Messages:
        rows = Array(("N", "N"), PROBABILITIES)
        return Messages(
            up={"soft_targets": rows, "counts": Array(("N",), COUNTS)},
            down={"soft_targets": Maybe(rows), "known": Maybe(KNOWN)},
            evaluation={},
        )

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        if not state:
            return Message()
        return Message(**state["without"].get(str(client.id), state["all"]))

    def client_round(self, client: Client, message: Message) -> Message:
        taught = bool(message) and self.weight > 0
        objective = self.objective if taught else supervised
        client.weights = client.sgd(client.weights, objective, dict(message))
        rows, counts = class_means(client, client.logits(on="train").softmax(1))
        return Message(soft_targets=or_uniform(rows, present(counts)), counts=counts)

    def objective(
        self, model: Network, private: Private, public: None, sent: dict[str, Tensor]
    ) -> Tensor:
        logits = model(private.x)
        teacher, known = sent["soft_targets"][private.y], sent["known"][private.y] > 0.5
        distilled = cross_entropy(logits, teacher, reduction="none") * known
        return cross_entropy(logits, private.y) + self.weight * distilled.mean()

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        """The mean of all rows of a class; and for each client that sent some, of the others'."""
        rows = received(replies, "soft_targets")
        has = present(received(replies, "counts"))
        amounts = has * torch.tensor([[reply.weight] for reply in replies]).to(has.device)
        sums = amounts[..., None] * rows.double()  # so that what is taken away leaves no rounding
        total, clients = sums.sum(0), has.sum(0)
        without = {
            str(reply.client.id): mean_rows(total - own, clients - there, rows.dtype)
            for reply, own, there in zip(replies, sums, has.int(), strict=True)
        }
        return {"all": mean_rows(total, clients, rows.dtype), "without": without}


def mean_rows(sums: Tensor, clients: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """The mean row of each class, of sums of rows that each sum to one; and which classes have one:
    those that at least one client sent."""
    known = clients > 0
    sums = or_uniform(sums.clamp(min=0), known)
    rows = sums / sums.sum(1, keepdim=True)
    return {"soft_targets": rows.to(dtype), "known": known.to(dtype)}


def or_uniform(rows: Tensor, known: Tensor) -> Tensor:
    """``rows``, but uniform probabilities, which say nothing, where nothing is known."""
    return torch.where(known[:, None], rows, 1 / rows.shape[1])
