"""PerFed-CKT: personalized federated learning with clustered knowledge transfer.

Cho, Wang, Chiruvolu, Joshi: *Personalized Federated Learning for Heterogeneous Clients with
Clustered Knowledge Transfer*, Algorithm 1, in its order. Only soft decisions (class
probabilities) on a small unlabeled public set P cross the network, never weights, so every client
may have a model of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softmax

from perfed.algorithms.clustering import (
    check_clusters,
    cmeans,
    in_the_order_of,
    nearest,
    overlap,
)
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Network,
    Objective,
    Parts,
    Public,
    Reply,
    Server,
    algorithms,
    supervised,
)
from perfed.core.declaration import PROBABILITIES, Array, AtMost, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree


@algorithms.register("perfed-ckt")
@dataclass(frozen=True)
class PerFedCKT(Algorithm):
    clusters: int = option(3, "how many centroids the server forms and sends", symbol="c", ge=1)
    weight: float = option(2.0, "weight of agreement with the nearest centroid", symbol="λ", ge=0)

    sends = "outputs on public samples"
    needs_public_set = trains_on_public_set = has_opening = True

    # What crosses.
    def messages(self) -> Messages:
        centroids = Array((AtMost(self.clusters), "P", "N"), PROBABILITIES)
        return Messages(
            up={"soft_decisions": Array(("P", "N"), PROBABILITIES)},
            down={"centroids": centroids},
            evaluation={},
        )

    # Line 3. An initial set S(−1) of m clients sends its soft decisions.
    def first_message(self, client: Client) -> Message:
        return Message(soft_decisions=client.soft_decisions())

    # Lines 6–7. The server clusters the m matrices it received and keeps the centroids.
    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        received = torch.stack([reply.message["soft_decisions"] for reply in replies])
        centroids = cmeans(received, self.clusters, server.random("c-means"))
        return {"centroids": in_the_order_of(state.get("centroids", centroids), centroids)}

    # Line 9. It sends all centroids to each of the next m clients.
    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(centroids=state["centroids"])

    # Lines 10–15. A client finds its nearest centroid s̄, makes τ steps, sends its soft decisions.
    def client_round(self, client: Client, message: Message) -> Message:
        centroids = message["centroids"]
        cluster = nearest(centroids, client.soft_decisions())
        client.weights = client.sgd(client.weights, self.objective, centroids[cluster])
        client.state = {"cluster": cluster}
        return Message(soft_decisions=client.soft_decisions())

    # The objective Φ_k(w; s̄): cross-entropy on a private mini-batch, agreement on a public one.
    @property
    def objective(self) -> Objective:
        # With λ=0 it is local training, to the bit: the public set is not even looked at.
        return Parts(supervised, self.agreement) if self.weight else supervised

    def agreement(self, model: Network, private: None, public: Public, teacher: Tensor) -> Tensor:
        student = softmax(model.public(public.x), dim=1)
        return self.weight * (teacher[public.index] - student).square().sum(1).mean()

    # For the log: how alike the centroids are, and how like those of the round before.
    def describe(self, before: Tree, state: Tree) -> dict[str, Any]:
        now: Tensor = state["centroids"]
        earlier: Tensor = before["centroids"] if before else now
        return {
            "centroid_overlap": overlap(now, now).tolist(),
            "earlier_overlap": overlap(earlier, now).tolist(),
        }

    def placed(self, state: Tree, replies: Sequence[Reply]) -> dict[int, int]:
        said = {reply.client.id: reply.message["soft_decisions"] for reply in replies}
        return {client: int(nearest(state["centroids"], own)) for client, own in said.items()}

    def check(self, clients_per_round: int) -> None:
        check_clusters(self.clusters, clients_per_round)
