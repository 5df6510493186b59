"""HypCluster (Mansour et al. 2020; IFCA, Ghosh et al. 2020): c global models, each client on one.

A client picks the model with the lowest loss on its own *training* data (never test), trains it,
and says which it was; each cluster's model becomes the mean of its clients' as FedAvg takes it, and
an empty cluster stays as it was. The c models start from different draws; the first is the one
FedAvg would start from. Each architecture has c models of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from perfed.algorithms.fedavg import by_architecture, mean_model
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Predictor,
    Reply,
    Server,
    algorithms,
    supervised,
)
from perfed.core.declaration import SAMPLES, Array, Messages, Model, Numbered, Whole
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree, Weights


@algorithms.register("hypcluster")
@dataclass(frozen=True)
class HypCluster(Algorithm):
    clusters: int = option(3, "how many global models", symbol="c", ge=1)

    sends = "weights"
    not_private = "chooses what it sends by its loss on training samples, which no noise covers"
    evaluated_with_server = True

    def messages(self) -> Messages:
        models = {"models": Numbered(Model(), self.clusters)}
        cluster = Array((), Whole(0, self.clusters - 1))
        up = {"model": Model(), "cluster": cluster, "samples": SAMPLES}
        return Messages(up=up, down=models, evaluation=models)

    def start(self, server: Server) -> Tree:
        return {
            architecture: {
                str(cluster): server.initial(architecture, cluster)
                for cluster in range(self.clusters)
            }
            for architecture in server.architectures
        }

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(models=state[client.architecture])

    def client_round(self, client: Client, message: Message) -> Message:
        cluster, chosen = choose(client, message)
        trained = client.sgd(chosen, supervised)
        client.state = {"cluster": cluster}
        return Message(model=trained, cluster=cluster, samples=client.samples)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        state = dict(state)
        for architecture, group in by_architecture(replies).items():
            members: dict[str, list[Reply]] = {}
            for reply in group:
                members.setdefault(str(int(reply.message["cluster"])), []).append(reply)
            means = {cluster: mean_model(own) for cluster, own in members.items()}
            state[architecture] = state[architecture] | means
        return state

    def placed(self, state: Tree, replies: Sequence[Reply]) -> dict[int, int]:
        return {reply.client.id: int(reply.message["cluster"]) for reply in replies}

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return self.broadcast(server, state, client)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"personal": choose(client, message)[1]}


def choose(client: Client, message: Message) -> tuple[torch.Tensor, Weights]:
    """The cluster whose model has the lowest training loss, and that model."""
    received = message["models"]
    models: list[Weights] = [received[str(n)] for n in range(len(received))]
    cluster = client.losses(models, "train").argmin()
    return cluster, models[int(cluster)]
