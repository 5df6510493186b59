"""LG-FedAvg (Liang et al. 2020): clients keep their own body, and average their heads.

Paper: *Think Locally, Act Globally: Federated Learning with Local and Global Representations*. The
variant is HtFLlib's, for networks that differ: what is averaged is the last layer, the head. All
below it is the client's own. Networks may differ in all but the shape of their head.

Two models are evaluated. ``personal`` is the one that the client trained last, with its own head.
``global`` is its body with the mean head: what the authors and HtFLlib evaluate.

Where this differs:

* In the authors' experiments clients have one network, start from a model that FedAvg trained, and
  average its last one or two layers. Here they start from initial weights.
* HtFLlib starts all clients with the head of the first one. Here there is no shared head before the
  first mean. Clients of one architecture start with the same head.
* The authors' mean is plain, HtFLlib's is by samples. Here a client counts as ``averaging`` says.
* The authors report each client's best test round. Here no choice looks at test samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Predictor,
    Reply,
    Sends,
    Server,
    algorithms,
    supervised,
    weighted_average,
)
from perfed.core.declaration import SAMPLES, Maybe, Messages, PerParameter
from perfed.core.message import Message
from perfed.core.tree import Tree, Weights


@algorithms.register("lg-fedavg")
@dataclass(frozen=True)
class LGFedAvg(Algorithm):
    sends: ClassVar[Sends] = "parts of networks"
    needs_features = shares_features = evaluated_with_server = True
    merges_by_mean: ClassVar[bool] = True

    def messages(self) -> Messages:
        head = PerParameter("head")
        down = {"head": Maybe(head)}
        return Messages(up={"head": head, "samples": SAMPLES}, down=down, evaluation=down)

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(**state)  # before the first merge there is no shared head

    def client_round(self, client: Client, message: Message) -> Message:
        client.weights = client.sgd(self.with_shared_head(client, message), supervised)
        return Message(head=client.head_of(client.weights), samples=client.samples)

    def with_shared_head(self, client: Client, message: Message) -> Weights:
        """The client's body with the head that the server sent, or its own where it sent none."""
        own = client.weights
        return client.with_head(own, message["head"]) if message else own

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        heads = [reply.message["head"] for reply in replies]
        return {"head": weighted_average(heads, [reply.weight for reply in replies])}

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return self.broadcast(server, state, client)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"personal": client.weights, "global": self.with_shared_head(client, message)}
