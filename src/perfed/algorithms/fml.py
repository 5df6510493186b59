"""FML (Shen et al. 2020, federated mutual learning): each client trains a network of its own and a
small shared one together.

The two learn from labels and from each other's opinion of the client's samples. Only the small one
(the authors' "meme") is sent and averaged. So clients' own networks may differ in everything.

The variant: α and β are the shares of the labels in the two losses, 0.5 each. An opinion is a
constant in the other's loss, and the divergence is the mean over samples, both as in the authors'
code. There the divergence is KL; here it is the cross-entropy to the opinion, which has the same
gradient. Deviations: the small network's mean is by ``averaging`` (theirs is plain). BatchNorm's
buffers are averaged with its parameters. Both networks train at the experiment's learning rate.
Their small network is a LeNet for 32×32 pictures; here it is a small MLP unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.algorithms.fedavg import mean_model
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Network,
    OfNetwork,
    Predictor,
    Private,
    Reply,
    Server,
    algorithms,
)
from perfed.core.declaration import SAMPLES, Messages, Model
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import OWN, Tree
from perfed.models import MLP, Architecture

SMALL = "small"
"""The name of the shared network."""


@algorithms.register("fml")
@dataclass(frozen=True)
class FML(Algorithm):
    small: Architecture = option(MLP((32,)), "the network that all clients share")
    own_labels: float = option(
        0.5, "share of the labels in the own network's loss", symbol="α", ge=0, le=1
    )
    small_labels: float = option(
        0.5, "share of the labels in the shared network's loss", symbol="β", ge=0, le=1
    )

    sends = "a second network"
    evaluated_with_server = True

    def messages(self) -> Messages:
        model = {"model": Model(SMALL)}
        return Messages(up={**model, "samples": SAMPLES}, down=model, evaluation=model)

    def networks(self) -> Mapping[str, Any]:
        return {SMALL: self.small}

    def start(self, server: Server) -> Tree:
        return {"model": server.initial(SMALL, 0)}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(model=state["model"])

    def client_round(self, client: Client, message: Message) -> Message:
        both = client.sgd({OWN: client.weights, SMALL: message["model"]}, self.objective)
        client.weights = both[OWN]
        return Message(model=both[SMALL], samples=client.samples)

    def objective(self, models: Mapping[str, Network], private: Private, public: None) -> Tensor:
        own, small = models[OWN](private.x), models[SMALL](private.x)
        return taught(own, small, private.y, self.own_labels) + taught(
            small, own, private.y, self.small_labels
        )

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        return {"model": mean_model(replies)}

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return self.broadcast(server, state, client)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"personal": client.weights, "global": OfNetwork(message["model"], SMALL)}


def taught(student: Tensor, teacher: Tensor, labels: Tensor, share: float) -> Tensor:
    """What a student learns from labels and from a teacher's logits, which stay as they are."""
    opinion = cross_entropy(student, teacher.detach().softmax(1))
    return share * cross_entropy(student, labels) + (1 - share) * opinion
