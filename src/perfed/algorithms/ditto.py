"""Ditto (Li et al. 2021): FedAvg's global model, and beside it each client's own, held near it.

The personal model v_k minimises F_k(v) + λ/2‖v − w‖² with w as it stood at the start of the round,
so personal and global steps do not depend on each other and their order is free. v_k starts from
the initial model and stays with its client. Both trainings see the same mini-batches. λ=1 is the
middle of the authors' grid {0.1, 1, 2}.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfed.algorithms.fedavg import FedAvg
from perfed.algorithms.fedprox import held_near
from perfed.core.algorithm import Client, Predictor, algorithms, supervised
from perfed.core.message import Message
from perfed.core.schema import option


@algorithms.register("ditto")
@dataclass(frozen=True)
class Ditto(FedAvg):
    weight: float = option(
        1.0, "how strongly a client is pulled to the global model", symbol="λ", ge=0
    )

    def client_round(self, client: Client, message: Message) -> Message:
        start = message["model"]
        client.weights = client.sgd(client.weights, held_near(self.weight), start.params, stream=0)
        trained = client.sgd(start, supervised, stream=0)
        return Message(model=trained, samples=client.samples)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"personal": client.weights, "global": message["model"]}
