"""SCAFFOLD (Karimireddy et al. 2020): FedAvg with control variates against client drift.

The variant: option II of the paper, which its authors use in their experiments (no further pass
over the data), c_i⁺ = c_i − c + (x − y_i)/(τη). As there, the mean over the selected clients is
unweighted, the global step is η_g (1), and c moves by |S|/N times the mean change, so that c stays
the mean of all N clients' c_i. Each architecture has a model and control variates of its own.
Parameters have control variates; BatchNorm's buffers have no gradient and are plainly averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.algorithms.fedavg import FedAvg, by_architecture
from perfed.core.algorithm import (
    Client,
    ClientInfo,
    Network,
    Parts,
    Reply,
    Server,
    algorithms,
    supervised,
    weighted_average,
)
from perfed.core.declaration import Messages, Model, PerParameter
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree, Weights, inner_product

Parameters = dict[str, Tensor]


@algorithms.register("scaffold")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    global_rate: float = option(1.0, "η_g: step of the global model", gt=0)

    needs_plain_sgd = True  # option II reads the gradients off the way a client has gone

    def messages(self) -> Messages:
        return Messages(
            up={"model": Model(), "control_change": PerParameter()},
            down={"model": Model(), "control": PerParameter()},
            evaluation={"model": Model()},
        )

    def start(self, server: Server) -> Tree:
        models = super().start(server)
        return {
            architecture: {"model": weights, "control": zeros_like(weights.params)}
            for architecture, weights in models.items()
        }

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(**state[client.architecture])

    def client_round(self, client: Client, message: Message) -> Message:
        start: Weights = message["model"]
        control: Parameters = message["control"]
        own: Parameters = client.state.get("control") or zeros_like(start.params)
        correction = {name: control[name] - own[name] for name in own}
        trained = client.sgd(start, Parts(supervised, along), correction)
        length = client.steps * client.learning_rate
        change = {
            name: (start.params[name] - trained.params[name]) / length - control[name]
            for name in own
        }
        client.state = {"control": {name: own[name] + change[name] for name in own}}
        return Message(model=trained, control_change=change)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        state = dict(state)
        for architecture, group in by_architecture(replies).items():
            messages = [reply.message for reply in group]
            old: Weights = state[architecture]["model"]
            mean = weighted_average([m["model"] for m in messages], [1.0] * len(messages))
            params = {
                name: old.params[name] + self.global_rate * (mean.params[name] - old.params[name])
                for name in old.params
            }
            changes = [message["control_change"] for message in messages]
            control = {
                name: c
                + sum(change[name] for change in changes) / server.architectures[architecture]
                for name, c in state[architecture]["control"].items()
            }
            state[architecture] = {"model": mean._replace(params=params), "control": control}
        return state

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(model=state[client.architecture]["model"])


def along(model: Network, private: None, public: None, correction: Parameters) -> Tensor:
    """Its gradient is the correction itself."""
    return inner_product(correction, model.params)


def zeros_like(params: Parameters) -> Parameters:
    return {name: torch.zeros_like(tensor) for name, tensor in params.items()}
