"""FedMRL (Yi et al., NeurIPS 2024): a small shared network beside the client's own, and nested
representations of both.

The features of the small network and of the client's own are put side by side, and the client's
projector maps them to one representation, as wide as the own network's features. The own head reads
all of it, the small head its first part (a "Matryoshka"). All three are trained together on the sum
of both losses. Only the small network is sent and averaged. The projector stays with its client: it
is part of the client's state, and so in every checkpoint.

The variant: the projector is one Linear layer, and both losses count 1, as in the authors' code. A
client is evaluated with its own head, and with the small network as the client itself last trained
it, as there. The small network alone is no model, for its head reads projected features only. So
there is no global model. Deviations: the authors cut gradients at norm 50; here nothing is cut.
Their weights in the mean count a client's test samples too; here ``averaging`` decides. All
projectors of an architecture start from one draw, and clients keep them as they trained them.
The small network may be at most as wide as each client's own; theirs is a CNN for 32×32 pictures,
here it is a small MLP unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.algorithms.fedavg import mean_model
from perfed.core.algorithm import (
    Algorithm,
    Between,
    Client,
    ClientInfo,
    Network,
    Predictor,
    Private,
    Reply,
    Server,
    Spliced,
    algorithms,
)
from perfed.core.declaration import SAMPLES, Messages, Model
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import OWN, Tree, Weights
from perfed.models import MLP, Architecture

SMALL, PROJECTOR = "small", "projector"


@algorithms.register("fedmrl")
@dataclass(frozen=True)
class FedMRL(Algorithm):
    small: Architecture = option(MLP((32,)), "the network that all clients share")
    fine: float = option(1.0, "weight of the own head's loss", symbol="m_hf", ge=0)
    coarse: float = option(1.0, "weight of the small head's loss", symbol="m_lc", ge=0)

    sends = "a second network"
    needs_features = True

    def check(self, clients_per_round: int) -> None:
        if not self.fine and not self.coarse:
            raise ConfigError("is 0, and so is coarse: one of them must be more", "fine")

    def messages(self) -> Messages:
        model = {"model": Model(SMALL)}
        return Messages(up={**model, "samples": SAMPLES}, down=model, evaluation={})

    def networks(self) -> Mapping[str, Any]:
        linear = MLP(hidden=())
        return {SMALL: self.small, PROJECTOR: Between(linear, takes=(SMALL, OWN), gives=OWN)}

    def start(self, server: Server) -> Tree:
        return {"model": server.initial(SMALL, 0)}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(model=state["model"])

    def client_round(self, client: Client, message: Message) -> Message:
        kept = kept_by(client)
        check_widths(kept[PROJECTOR])
        trained = client.sgd(
            {OWN: client.weights, SMALL: message["model"], PROJECTOR: kept[PROJECTOR]},
            self.objective,
        )
        client.weights = trained[OWN]
        client.state = {SMALL: trained[SMALL], PROJECTOR: trained[PROJECTOR]}
        return Message(model=trained[SMALL], samples=client.samples)

    def objective(self, models: Mapping[str, Network], private: Private, public: None) -> Tensor:
        small = models[SMALL].features(private.x)
        spliced = torch.cat([small, models[OWN].features(private.x)], 1)
        projected = models[PROJECTOR](spliced)
        fine = cross_entropy(models[OWN].head(projected), private.y)
        coarse = models[SMALL].head(projected[:, : small.shape[1]])
        return self.fine * fine + self.coarse * cross_entropy(coarse, private.y)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        return {"model": mean_model(replies)}

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        kept = kept_by(client)
        names = (SMALL, PROJECTOR)
        return {"personal": Spliced(client.weights, kept[SMALL], kept[PROJECTOR], names)}


def kept_by(client: Client) -> dict[str, Weights]:
    """What a client keeps beside its own network; the initial ones before its first round."""
    return {name: client.state.get(name) or client.initial(name) for name in (SMALL, PROJECTOR)}


def check_widths(projector: Weights) -> None:
    """The small head reads a part of what the own head reads."""
    ((own, both),) = [tuple(t.shape) for t in projector.params.values() if t.ndim == 2]
    if both - own > own:
        raise ConfigError(
            f"gives {both - own} features, and a client's own network {own}: must be at most that",
            "algorithm.small",
        )
