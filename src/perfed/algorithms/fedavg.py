"""FedAvg (McMahan et al. 2017): one global model, the mean of the clients' by training samples.

Where clients are selected in proportion to these, the mean is plain (``averaging``).

BatchNorm's buffers are averaged with the parameters. Where clients differ in architecture there is
one global model per architecture, the mean of the clients that have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from perfed.core.tree import Tree, Weights


@algorithms.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Algorithm):
    sends = "weights"
    merges_by_mean = True
    evaluated_with_server = True

    def messages(self) -> Messages:
        model = {"model": Model()}
        return Messages(up={**model, "samples": SAMPLES}, down=model, evaluation=model)

    def start(self, server: Server) -> Tree:
        return {label: server.initial(label, 0) for label in server.architectures}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(model=state[client.architecture])

    def client_round(self, client: Client, message: Message) -> Message:
        trained = client.sgd(message["model"], supervised)
        return Message(model=trained, samples=client.samples)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        return state | average_by_architecture(replies)

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return self.broadcast(server, state, client)

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"global": message["model"]}


def average_by_architecture(replies: Sequence[Reply]) -> dict[str, Weights]:
    """The mean model of every architecture that answered."""
    return {
        architecture: mean_model(group) for architecture, group in by_architecture(replies).items()
    }


def mean_model(replies: Sequence[Reply]) -> Weights:
    """Each model counts as its reply does."""
    models: list[Weights] = [reply.message["model"] for reply in replies]
    return weighted_average(models, [reply.weight for reply in replies])


def by_architecture(replies: Sequence[Reply]) -> dict[str, list[Reply]]:
    """What came back, from clients of each architecture that answered."""
    answered: dict[str, list[Reply]] = {}
    for reply in replies:
        answered.setdefault(reply.client.architecture, []).append(reply)
    return answered
