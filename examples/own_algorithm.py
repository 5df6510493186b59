"""An algorithm of your own, in one file, beside two that are there.

    python examples/own_algorithm.py    some seconds

Clusters are hard: a client is in one of them. Here every client gets a teacher of its own instead:
the mean of what all others said last, those that say what it says weighing most. What makes such a
class work with every engine is in CONTRIBUTING.md. On the command line, in the folder of this file:

    perfed compare -a local -a own_algorithm:SoftNeighbours,sharpness=3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import perfed
from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.core.algorithm import Algorithm, Client, ClientInfo, Reply, Server
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree


@dataclass(frozen=True)
class SoftNeighbours(Algorithm):
    """Like PerFed-CKT, with weights that fall with distance in the place of clusters."""

    weight: float = option(1.0, "weight of agreement with the teacher", symbol="λ", ge=0)
    sharpness: float = option(5.0, "how fast weights fall with distance", ge=0)

    needs_public_set = trains_on_public_set = has_opening = True

    def first_message(self, client: Client) -> Message:
        return Message(soft_decisions=client.soft_decisions())

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        new = {str(reply.client.id): reply.message["soft_decisions"] for reply in replies}
        return {"said": {**state.get("said", {}), **new}}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        said = dict(state["said"])
        own = said.pop(str(client.id), None)
        others = torch.stack(list(said.values()))
        return Message(teacher=others.mean(0) if own is None else self.mixed(own, others))

    def mixed(self, own: Tensor, others: Tensor) -> Tensor:
        distance = (others - own).square().sum((1, 2))
        shares = torch.softmax(-self.sharpness * distance / distance.mean().clamp(min=1e-9), 0)
        return torch.einsum("i,ipn->pn", shares, others)

    def client_round(self, client: Client, message: Message) -> Message:
        objective = PerFedCKT(weight=self.weight).objective
        client.weights = client.sgd(client.weights, objective, message["teacher"])
        return Message(soft_decisions=client.soft_decisions())


if __name__ == "__main__":
    experiment = perfed.Experiment(
        name="own-algorithm",
        rounds=15,
        clients=12,
        clients_per_round=6,
        training={"learning_rate": 0.1},
    )
    algorithms = ["local", f"{__file__}:SoftNeighbours", {"name": "perfed-ckt", "weight": 1.0}]
    comparison = perfed.Comparison(experiment=experiment, algorithms=algorithms)
    print(perfed.compare(comparison).table())
