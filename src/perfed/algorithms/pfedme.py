"""pFedMe (Dinh, Tran, Nguyen 2020): a global model, and near it personal ones, by Moreau envelopes.

The global model minimises the mean of F_i(w) = min_θ f_i(θ) + λ/2‖θ − w‖². For each of its τ
mini-batches a client makes K steps of size ρ towards that θ, on the same samples, and then moves
its local model w by −ηλ(w − θ̃). The server goes β of the way from its model to the mean of the
local ones. The personal model is the last θ̃. It stays with its client. As in the authors' code,
the K steps start from the θ̃ of the mini-batch before, and in each round from the global model.
λ, K, ρ and β have the defaults of that code.

* That code adds a weight decay of 0.001 to the K steps. It is not here.
* Only selected clients train. In that code all clients do, and only selected ones are averaged.
* That code's mean is by training samples. Here it is as the experiment's ``averaging`` says.
* BatchNorm's running statistics: each of the two models has its own, moved once for a mini-batch,
  the personal ones at θ̃. The server takes the mean of the local ones itself, whatever β is: a
  variance beyond it could be negative.

The two step sizes must fit λ: ρλ < 2, or the K steps diverge, and ηλ < 2, or w does. The
experiment's learning rate η is 0.005 in the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.algorithms.fedavg import FedAvg, average_by_architecture
from perfed.algorithms.perfedavg import gradient, moved
from perfed.core.algorithm import (
    OWN,
    Client,
    Network,
    Predictor,
    Private,
    Reply,
    Server,
    algorithms,
)
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree, Weights, inner_product

Parameters = dict[str, Tensor]
PERSONAL = "personal"


@algorithms.register("pfedme")
@dataclass(frozen=True)
class PFedMe(FedAvg):
    weight: float = option(
        15.0, "how strongly a personal model is pulled to the local one", symbol="λ", gt=0
    )
    personal_steps: int = option(5, "steps to the personal model, a mini-batch", symbol="K", ge=1)
    personal_rate: float = option(0.09, "size of these steps", symbol="ρ", gt=0)
    mixing: float = option(
        1.0, "how far the server goes to the mean of the local models", symbol="β", gt=0
    )

    not_private = "makes steps that are no gradients, so that no sample's part can be bounded"
    needs_plain_sgd = True  # the objective's gradient is the whole step

    def check(self, clients_per_round: int) -> None:
        if self.personal_rate * self.weight >= 2:
            raise ConfigError(
                f"steps of {self.personal_rate:g} with a weight of {self.weight:g} lead away from "
                f"every personal model: must be below {2 / self.weight:g}",
                "algorithm.personal_rate",
            )

    def networks(self) -> Mapping[str, Any]:
        return {PERSONAL: OWN}

    def client_round(self, client: Client, message: Message) -> Message:
        start: Weights = message["model"]
        rate = next(iter(start.params.values())).new_tensor(client.learning_rate)
        trained = client.sgd({OWN: start, PERSONAL: start}, self.objective, rate, rate=1.0)
        client.weights = trained[PERSONAL]
        return Message(model=trained[OWN], samples=client.samples)

    def objective(
        self, models: Mapping[str, Network], private: Private, public: None, rate: Tensor
    ) -> Tensor:
        """Its gradient is ηλ(w − θ̃) for the local model and θ − θ̃ for the personal one, so that a
        step of size 1 moves the first as the method says, and the second to θ̃."""
        local, personal = models[OWN], models[PERSONAL]
        w, θ = detached(local.trained), detached(personal.trained)
        solution = self.solution(personal, private, θ, w)
        local(private.x)  # moves BatchNorm's running statistics, as a plain step would
        personal.at(personal.params | solution, moves_statistics=True)(private.x)
        away = {name: rate * self.weight * (w[name] - found) for name, found in solution.items()}
        back = {name: θ[name] - found for name, found in solution.items()}
        return inner_product(away, local.params) + inner_product(back, personal.params)

    def solution(
        self, model: Network, batch: Private, start: Parameters, w: Parameters
    ) -> Parameters:
        """θ̃: K steps on f(θ) + λ/2‖θ − w‖², all of them on one mini-batch."""
        θ = start
        for _ in range(self.personal_steps):
            slope = gradient(model, θ, batch)
            pulled = {name: slope[name] + self.weight * (t - w[name]) for name, t in θ.items()}
            θ = moved(θ, -self.personal_rate, pulled)
        return θ

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        means = average_by_architecture(replies)
        return state | {name: self.mixed(state[name], mean) for name, mean in means.items()}

    def mixed(self, old: Weights, mean: Weights) -> Weights:
        params = {
            name: torch.lerp(param, mean.params[name], self.mixing)
            for name, param in old.params.items()
        }
        return mean._replace(params=params)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"personal": client.weights, "global": message["model"]}


def detached(params: Parameters) -> Parameters:
    return {name: param.detach() for name, param in params.items()}
