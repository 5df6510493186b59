"""FedProx (Li et al. 2020): FedAvg whose clients are held near the global model.

The variant: the proximal term μ/2‖w − w_global‖² on the clients' objective, all clients making the
same τ steps. The paper's other half, partial work of slow clients, is a matter of the engine and
not simulated. μ=1 is the value its authors found best on three of their five datasets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from perfed.algorithms.fedavg import FedAvg
from perfed.core.algorithm import Client, Network, Objective, Parts, algorithms, supervised
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import squared_distance


@algorithms.register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    proximal: float = option(
        1.0, "how strongly a client is pulled to the global model", symbol="μ", ge=0
    )

    def client_round(self, client: Client, message: Message) -> Message:
        start = message["model"]
        trained = client.sgd(start, held_near(self.proximal), start.params)
        return Message(model=trained, samples=client.samples)


def held_near(weight: float) -> Objective:
    """The plain objective and weight/2·‖w − anchor‖²; with no weight the plain one, to the bit."""
    return Parts(supervised, partial(pull, weight)) if weight else supervised


def pull(
    weight: float, model: Network, private: None, public: None, anchor: dict[str, Tensor]
) -> Tensor:
    return weight / 2 * squared_distance(model.params, anchor)
