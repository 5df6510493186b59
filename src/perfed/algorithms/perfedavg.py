"""Per-FedAvg (Fallah, Mokhtari, Ozdaglar 2020): a global model that is good *after* one step.

The meta-objective is F_i(w) = f_i(w − α∇f_i(w)). Its gradient (I − α∇²f_i(w)) ∇f_i(w − α∇f_i(w)) is
estimated from three independent mini-batches, and used for τ steps of size β (the experiment's
learning rate), then FedAvg's mean. Two variants, both the authors':

* ``hessian-free``: the product with ∇²f by the difference of two gradients at w ± δ·g;
* ``first-order``: without that term.

The personal model is the global one after ``adaptation_steps`` steps of size α on the client's
training data; the global model is the meta-model itself. α, δ and the single step are the authors'.
First-order is the default: on networks with BatchNorm the other has diverged here, at step sizes at
which all else was stable.
Mini-batches at displaced parameters do not move BatchNorm's running statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.func import grad

from perfed.algorithms.fedavg import FedAvg
from perfed.core.algorithm import Client, Network, Predictor, Private, algorithms, supervised
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import inner_product

Parameters = dict[str, Tensor]
ADAPTATION = 1  # a stream of mini-batches that training does not use


@algorithms.register("per-fedavg")
@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    inner_rate: float = option(0.01, "size of the adaptation step", symbol="α", ge=0)
    variant: Literal["first-order", "hessian-free"] = option(
        "first-order", "how the meta-gradient is estimated"
    )
    difference: float = option(1e-3, "δ: displacement for the Hessian-free product", gt=0)
    adaptation_steps: int = option(1, "steps from the global to a client's own model", ge=0)

    not_private = "takes three private mini-batches a step, and noise is for one"
    needs_plain_sgd = True  # what is trained is good after a plain step, and adapted by one

    def client_round(self, client: Client, message: Message) -> Message:
        trained = client.sgd(message["model"], self.objective, batches=3)
        return Message(model=trained, samples=client.samples)

    def objective(
        self, model: Network, private: tuple[Private, Private, Private], public: None
    ) -> Tensor:
        outer, inner, curvature = private
        if self.inner_rate == 0:  # FedAvg, to the bit
            return supervised(model, outer, None)
        here = {name: param.detach() for name, param in model.trained.items()}
        ahead = moved(here, -self.inner_rate, gradient(model, here, inner))
        direction = gradient(model, ahead, outer)
        if self.variant == "hessian-free":
            plus = gradient(model, moved(here, self.difference, direction), curvature)
            minus = gradient(model, moved(here, -self.difference, direction), curvature)
            product = {n: (plus[n] - minus[n]) / (2 * self.difference) for n in plus}
            direction = moved(direction, -self.inner_rate, product)
        model(outer.x)  # moves BatchNorm's running statistics, as a plain step would
        return inner_product(direction, model.params)  # whose gradient is the estimate

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        adapted = client.sgd(
            message["model"],
            supervised,
            steps=self.adaptation_steps,
            rate=self.inner_rate,
            stream=ADAPTATION,
        )
        return {"personal": adapted, "global": message["model"]}


def gradient(model: Network, params: Parameters, batch: Private) -> Parameters:
    """∇f at ``params`` on one mini-batch, for these; what is frozen stays as it is."""

    def loss(at: Parameters) -> Tensor:
        return supervised(model.with_params(at), batch, None)

    result: Parameters = grad(loss)(params)
    return result


def moved(params: Parameters, distance: float, direction: Parameters) -> Parameters:
    return {name: param + distance * direction[name] for name, param in params.items()}
