"""COMET as others compare with it: clients are clustered anew for each public sample.

COMET is the name that PerFed-CKT has in its journal version (Cho, Wang, Chirvolu, Joshi:
*Communication-Efficient and Model-Heterogeneous Personalized Federated Learning via Clustered
Knowledge Transfer*, 2023). That text could not be had here, so this is **not** written from it. It
is the COMET of the public experiments of SCARLET's authors, who call theirs simplified.

What differs from PerFed-CKT:

* PerFed-CKT clusters whole matrices of soft decisions: a client has one cluster in a round. Here
  each public sample is clustered by itself, so a client may be with some clients about one sample
  and with others about the next.
* A client takes, for each sample, the centroid nearest to what it says of that sample.
* It first imitates these, by λ times the KL divergence, then trains on its own samples.
  PerFed-CKT does both in the same steps, with the squared distance.
* Nobody sends anything before the first round, and in it nobody is taught.

What differs from that code: it draws some public samples for each round, and all are used here; it
trains a model at the server that no client sees; its c-means has one start, this one has ten. Its
c and λ are set for each experiment, so the defaults are PerFed-CKT's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.algorithms.clustering import check_clusters, cmeans_of_each, nearest_of_each
from perfed.algorithms.lessons import imitate, learn
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Network,
    Public,
    Reply,
    Server,
    algorithms,
)
from perfed.core.declaration import PROBABILITIES, Array, AtMost, Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree


@algorithms.register("comet")
@dataclass(frozen=True)
class Comet(Algorithm):
    clusters: int = option(3, "how many centroids each public sample has", symbol="c", ge=1)
    weight: float = option(2.0, "weight of imitating the nearest centroids", symbol="λ", ge=0)
    distil_steps: int | None = option(
        None, "steps a round on public samples; null: as many as on private ones", ge=0
    )

    sends = "outputs on public samples"
    needs_public_set = trains_on_public_set = True

    def messages(self) -> Messages:
        centroids = Array((AtMost(self.clusters), "P", "N"), PROBABILITIES)
        return Messages(
            up={"soft_decisions": Array(("P", "N"), PROBABILITIES)},
            down={"centroids": Maybe(centroids)},
            evaluation={},
        )

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        received = torch.stack([reply.message["soft_decisions"] for reply in replies])
        return {"centroids": cmeans_of_each(received, self.clusters, server.random("c-means"))}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(**state)

    def client_round(self, client: Client, message: Message) -> Message:
        lesson: list[Tensor] = []
        if "centroids" in message:
            lesson = [nearest_of_each(message["centroids"], client.soft_decisions())]
        client.weights = learn(client, client.weights, self.agreement, lesson, self.distil_steps)
        return Message(soft_decisions=client.soft_decisions())

    def agreement(self, model: Network, private: None, public: Public, teacher: Tensor) -> Tensor:
        return self.weight * imitate(model, private, public, teacher)

    def check(self, clients_per_round: int) -> None:
        check_clusters(self.clusters, clients_per_round)
