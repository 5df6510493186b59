"""FedAvg-FT: FedAvg, and then each client trains the global model on its own data for some steps.

The plainest personalization, and a strong one (Yu et al. 2020; Cheng et al. 2021): nothing more
crosses than in FedAvg. A client's model is made from the newest global model whenever it is
evaluated, with the experiment's optimizer and learning rate, and is not kept. It trains on training
samples only, in mini-batches that FedAvg's own training does not use.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfed.algorithms.fedavg import FedAvg
from perfed.core.algorithm import Client, Predictor, algorithms, supervised
from perfed.core.message import Message
from perfed.core.schema import option

TUNING = 1  # a stream of mini-batches that training does not use


@algorithms.register("fedavg-ft")
@dataclass(frozen=True)
class FedAvgFT(FedAvg):
    tuning_steps: int = option(20, "steps from the global to a client's own model", ge=0)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        tuned = client.sgd(message["model"], supervised, steps=self.tuning_steps, stream=TUNING)
        return {"personal": tuned, "global": message["model"]}
