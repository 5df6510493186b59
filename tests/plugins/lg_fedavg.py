"""LG-FedAvg (Liang et al. 2020): clients keep their representation and average the last layer.

Networks may differ below the head; its shape must be the same.
"""

from dataclasses import dataclass

from perfed.core.algorithm import Algorithm, supervised, weighted_average
from perfed.core.declaration import SAMPLES, Maybe, Messages, PerParameter
from perfed.core.message import Message


@dataclass(frozen=True)
class LGFedAvg(Algorithm):
    needs_features = shares_features = True

    def messages(self):
        head = {"head": PerParameter("head")}
        return Messages(
            up=head | {"samples": SAMPLES}, down={"head": Maybe(head["head"])}, evaluation={}
        )

    def broadcast(self, server, state, client):
        return Message(**state)  # before the first merge there is none

    def client_round(self, client, message):
        start = client.weights
        if "head" in message:
            start = client.with_head(start, message["head"])
        client.weights = client.sgd(start, supervised)
        return Message(head=client.head_of(client.weights), samples=client.samples)

    def merge(self, server, state, replies):
        weights = [reply.weight for reply in replies]
        return {"head": weighted_average([r.message["head"] for r in replies], weights)}
