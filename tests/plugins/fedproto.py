"""FedProto (Tan et al. 2022): clients send the mean features of each class, their prototypes.

A client draws the features of its samples to the mean prototype of their class, and predicts by
the nearest one. Networks may differ in all but the width of their features.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from perfed.core.algorithm import Algorithm, NearestPrototype, supervised
from perfed.core.declaration import COUNTS, REALS, Array, Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option


@dataclass(frozen=True)
class FedProto(Algorithm):
    weight: float = option(1.0, "weight of nearness to the prototypes", symbol="λ", ge=0)

    needs_features = shares_features = evaluated_with_server = True

    def messages(self):
        up = {"prototypes": Array(("N", "F"), REALS), "counts": Array(("N",), COUNTS)}
        down = {name: Maybe(entry) for name, entry in up.items()}
        return Messages(up, down, evaluation=down)

    def broadcast(self, server, state, client):
        return Message(**state)

    evaluation_message = broadcast

    def client_round(self, client, message):
        objective = self.objective if message else supervised
        client.weights = client.sgd(client.weights, objective, dict(message))
        sums, counts = client.class_sums(client.features())
        return Message(prototypes=sums / counts.clamp(min=1)[:, None], counts=counts.to(sums))

    def objective(self, model, private, public, sent):
        features = model.features(private.x)
        known = sent["counts"][private.y] > 0
        distance = (features - sent["prototypes"][private.y]).square().mean(1) * known
        return cross_entropy(model.head(features), private.y) + self.weight * distance.mean()

    def merge(self, server, state, replies):
        counts = torch.stack([reply.message["counts"] for reply in replies])
        means = torch.stack([reply.message["prototypes"] for reply in replies])
        total = counts.sum(0)
        prototypes = (counts[..., None] * means).sum(0) / total.clamp(min=1)[:, None]
        if state:  # classes that nobody saw this time keep theirs
            seen, old = total > 0, {name: t.to(total.device) for name, t in state.items()}
            prototypes = torch.where(seen[:, None], prototypes, old["prototypes"])
            total = torch.where(seen, total, old["counts"])
        return {"prototypes": prototypes, "counts": total}

    def models(self, client, message):
        own = client.weights
        return {"personal": NearestPrototype(own, **message) if message else own}
