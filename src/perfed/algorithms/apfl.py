"""APFL (Deng, Kamani, Mahdavi 2020): each client mixes a model of its own with the shared one.

A client trains the global model, w, as in FedAvg, and beside it a model v of its own, on the same
mini-batches. v makes its steps for the mixture v̄ = αv + (1−α)w: v ← v − η∇_v f(v̄), where the
gradient for v is α∇f(v̄). w is taken as it stood before the step. Personal is v̄ with the w that the
client has trained; v and α stay with the client. α is a constant, or ``adaptive``:
α ← α − η⟨v − w, ∇f(v̄)⟩ within 0 and 1, once a round on its first mini-batch, with the w that the
client got. α = 0.5 and constant are the defaults of the authors' code.

* Parameters are mixed. The authors' code mixes the outputs of the two networks.
* That code moves α after the first step of a round, adds 0.02α to its gradient, and takes v's step
  after w's. Here α moves before, by its own gradient alone, and v and w step together.
* BatchNorm's running statistics: the client keeps those of the mixture. A mixture of two models'
  statistics would fit neither. Those of w are averaged, as in FedAvg. v never runs alone, and has
  none.
* Which client counts how much is the experiment's ``averaging``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perfed.algorithms.fedavg import FedAvg
from perfed.core.algorithm import (
    OWN,
    Client,
    Network,
    Predictor,
    Private,
    algorithms,
    supervised,
)
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Weights, inner_product

Parameters = dict[str, Tensor]
PERSONAL = "personal"


@algorithms.register("apfl")
@dataclass(frozen=True)
class APFL(FedAvg):
    share: float = option(
        0.5, "share of the client's own model in the mixture", symbol="α", ge=0, le=1
    )
    adaptive: bool = option(False, "each client adapts its share, once a round")

    @property
    def needs_plain_sgd(self) -> bool:  # type: ignore[override]
        """The gradient for α is read off a plain step."""
        return self.adaptive

    def networks(self) -> Mapping[str, Any]:
        return {PERSONAL: OWN}

    def client_round(self, client: Client, message: Message) -> Message:
        local: Weights = message["model"]
        own: Parameters = client.state.get("own") or client.weights.params
        share = client.state.get("share", next(iter(own.values())).new_tensor(self.share))
        if self.adaptive:
            share = self.adapted(client, share, own, local)
        personal = client.weights._replace(params=own)
        trained = client.sgd({OWN: local, PERSONAL: personal}, self.objective, share, stream=0)
        local, personal = trained[OWN], trained[PERSONAL]
        client.weights = personal._replace(params=mixed(share, personal.params, local.params))
        client.state = {"own": personal.params, "share": share}
        return Message(model=local, samples=client.samples)

    def objective(
        self, models: Mapping[str, Network], private: Private, public: None, share: Tensor
    ) -> Tensor:
        local, personal = models[OWN], models[PERSONAL]
        constant = {name: param.detach() for name, param in local.params.items()}
        mixture = personal.at(mixed(share, personal.params, constant), moves_statistics=True)
        return supervised(local, private, public) + supervised(mixture, private, public)

    def adapted(self, client: Client, share: Tensor, own: Parameters, local: Weights) -> Tensor:
        """α after a step on f(αv + (1−α)w), on the mini-batch that training begins with."""
        before = client.weights._replace(params=mixed(share, own, local.params))
        after = client.sgd(before, supervised, steps=1, stream=0)
        step = {name: param - after.params[name] for name, param in before.params.items()}
        towards_own = {name: param - local.params[name] for name, param in own.items()}
        return (share - inner_product(step, towards_own)).clamp(0, 1)  # the step has η in it

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"personal": client.weights, "global": message["model"]}


def mixed(share: Tensor, own: Parameters, local: Parameters) -> Parameters:
    """αv + (1−α)w."""
    return {name: torch.lerp(local[name], param, share) for name, param in own.items()}
