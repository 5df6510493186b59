"""FedProto (Tan et al. 2022): clients exchange the mean features of each class, its prototypes.

Paper: *FedProto: Federated Prototype Learning across Heterogeneous Clients*. A client learns its
labels, and draws the features of each sample to the global prototype of its class, with weight λ.
It predicts the class whose prototype is nearest. Networks may differ in all but the width of their
features.

The variant, where paper and authors' code differ:

* As in the code, the distance is the mean squared difference of each sample's features from the
  prototype, and λ is 1. The paper has the distance of a client's mean features.
* As in the paper, a client counts in a class as much as it has samples of it; in the code all count
  the same. Where clients are selected by size, size counts in the draw only (``averaging``): then a
  client counts by the share of the class among its samples. The paper's further division by the
  number of clients is left out: the result would be no mean.
* As in the code, a client predicts among the classes that it has samples of to train on.
  HtFLlib predicts among all.

Where this differs from both:

* They average features while they train. Here prototypes are of the trained network, in evaluation
  mode, on all training samples.
* Not all clients need take part in a round. A class that nobody sent keeps its last prototype.
* Before the first prototypes there are, a client is evaluated by its own head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.algorithms.class_means import (
    KNOWN,
    PROTOTYPES,
    class_means,
    present,
    received,
    received_prototypes,
)
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    NearestPrototype,
    Network,
    Predictor,
    Private,
    Reply,
    Server,
    algorithms,
    supervised,
)
from perfed.core.declaration import Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree


@algorithms.register("fedproto")
@dataclass(frozen=True)
class FedProto(Algorithm):
    weight: float = option(1.0, "weight of nearness to the prototypes", symbol="λ", ge=0)

    sends = "class means"
    not_private = "sends means over its training samples, which no noise covers"
    needs_features = shares_features = evaluated_with_server = True

    def messages(self) -> Messages:
        down = {"prototypes": Maybe(PROTOTYPES["prototypes"]), "known": Maybe(KNOWN)}
        return Messages(up=PROTOTYPES, down=down, evaluation=down)

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        sent = ("prototypes", "known") if state else ()  # before the first merge there are none
        return Message(**{name: state[name] for name in sent})

    def client_round(self, client: Client, message: Message) -> Message:
        taught = bool(message) and self.weight > 0
        objective = self.objective if taught else supervised
        client.weights = client.sgd(client.weights, objective, dict(message))
        prototypes, counts = class_means(client, client.features())
        return Message(prototypes=prototypes, counts=counts)

    def objective(
        self, model: Network, private: Private, public: None, sent: dict[str, Tensor]
    ) -> Tensor:
        features = model.features(private.x)
        known = sent["known"][private.y] > 0.5
        distances = (features - sent["prototypes"][private.y]).square().mean(1) * known
        return cross_entropy(model.head(features), private.y) + self.weight * distances.mean()

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        counts, prototypes = received(replies, "counts"), received_prototypes(replies)
        has = present(counts)
        shares = torch.where(has, counts / counts.sum(1, keepdim=True), 0.0)
        amounts = shares * torch.tensor([[reply.weight] for reply in replies]).to(shares)
        amounts = amounts / amounts.sum(0).clamp(min=torch.finfo(amounts.dtype).tiny)
        means, known = (amounts[..., None] * prototypes).sum(0), has.any(0)
        if state:
            means = torch.where(known[:, None], means, state["prototypes"].to(means))
            known = known | (state["known"].to(means) > 0)
        return {"prototypes": means, "known": known.to(means)}

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return self.broadcast(server, state, client)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        if not message:
            return {"personal": client.weights}
        known = self.candidates(client, message["known"])
        return {"personal": NearestPrototype(client.weights, message["prototypes"], known)}

    def candidates(self, client: Client, known: Tensor) -> Tensor:
        """Those of the known classes that a client predicts: its own, where one of them is."""
        own = known * (client.label_counts() > 0)
        return torch.where(own.any(), own, known)
