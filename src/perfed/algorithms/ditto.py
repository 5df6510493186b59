"""Ditto (Li et al. 2021): FedAvg's global model, and beside it each client's own, held near it.

The personal model v_k minimises F_k(v) + λ/2‖v − w‖² with w as it stood at the start of the round,
so personal and global steps do not depend on each other and their order is free. v_k starts from
the initial model and stays with its client. Both trainings see the same mini-batches. λ=1 is the
middle of the authors' grid {0.1, 1, 2}.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from perfed.algorithms.fedavg import FedAvg
from perfed.core.algorithm import Client, Judged, Network, Private, algorithms, supervised
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import squared_distance


@algorithms.register("ditto")
@dataclass(frozen=True)
class Ditto(FedAvg):
    weight: float = option(1.0, "weight of nearness to the global model", symbol="λ", ge=0)

    def client_round(self, client: Client, message: Message) -> Message:
        start = message["model"]
        client.weights = client.sgd(client.weights, self.objective, start.params, stream=0)
        trained = client.sgd(start, supervised, stream=0)
        return Message(model=trained, samples=client.samples)

    def objective(
        self, model: Network, private: Private, public: None, start: dict[str, Tensor]
    ) -> Tensor:
        loss = supervised(model, private, public)
        if self.weight == 0:  # local training, to the bit
            return loss
        return loss + self.weight / 2 * squared_distance(model.params, start)

    def models(self, client: Client, message: Message) -> dict[str, Judged]:
        return {"personal": client.weights, "global": message["model"]}
