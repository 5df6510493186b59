"""FedPer (Arivazhagan et al. 2019): clients average the base of their network and keep the head.

Base and head are trained together, by τ steps on the client's samples. Then the base goes to
the server, which averages the bases of each architecture. The head stays with its client. A client
is evaluated with the newest averaged base and its own head.

The variant is that of FedRep's authors, whose code has FedPer beside their own method.

* The head is the network's last layer. For more personal layers, name a larger part of your own
  network as its head.
* BatchNorm's running statistics are sent and averaged with the base. They describe what happens
  inside the averaged layers, and no head keeps any.
* All heads of an architecture start from the same weights, unless ``models.initial`` says ``own``.
* Which client counts how much is the experiment's ``averaging``.

A network that is nothing but its head has no base: then this is local training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perfed.algorithms.fedavg import by_architecture
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Predictor,
    Reply,
    Server,
    algorithms,
    supervised,
    weighted_average,
)
from perfed.core.declaration import SAMPLES, Messages, Model
from perfed.core.message import Message
from perfed.core.network import base_of
from perfed.core.tree import Tree, Weights

NO_BASE = Weights({}, {})
"""Of a network that is nothing but its head. It leaves no trace in a message or a checkpoint."""


@algorithms.register("fedper")
@dataclass(frozen=True)
class FedPer(Algorithm):
    sends = "weights"  # all but the head's
    needs_features = True
    evaluated_with_server = merges_by_mean = True

    def messages(self) -> Messages:
        base = {"base": Model(part="base")}
        return Messages(up={**base, "samples": SAMPLES}, down=base, evaluation=base)

    def start(self, server: Server) -> Tree:
        return {
            label: base_of(server.head(label), server.initial(label, 0))
            for label in server.architectures
        }

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(base=state.get(client.architecture, NO_BASE))

    def client_round(self, client: Client, message: Message) -> Message:
        client.weights = self.trained(client, joined(message, client.weights))
        return Message(base=client.base_of(client.weights), samples=client.samples)

    def trained(self, client: Client, start: Weights) -> Weights:
        """The client's model after its training of this round."""
        return client.sgd(start, supervised)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        return state | {
            architecture: weighted_average(
                [reply.message.get("base", NO_BASE) for reply in group],
                [reply.weight for reply in group],
            )
            for architecture, group in by_architecture(replies).items()
        }

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return self.broadcast(server, state, client)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"personal": joined(message, client.weights)}


def joined(message: Message, own: Weights) -> Weights:
    """The base that was sent, with the client's own head."""
    base: Weights = message.get("base", NO_BASE)
    return own._replace(params=own.params | base.params, buffers=own.buffers | base.buffers)
