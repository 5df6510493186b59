"""FedFomo (Zhang et al. 2021): each client mixes in the models that help on its validation data.

A client drawn gets up to M models that other clients of its architecture sent in the last round
that had any. It weighs each by (own validation loss − its validation loss) / distance between the
two, cuts negatives to zero, normalises, and moves its model by the weighted differences; where none
helps it keeps its own. Then it trains, and sends its model and the weights it gave.

The server chooses candidates ε-greedily: with chance ε at random, else those with the highest
affinity, the sum of the weights this client ever gave them. M=5, ε=0.3 falling by 0.05 a round, as
in the authors' code. BatchNorm's buffers are mixed like parameters. Uses the validation part, never
test: the validation accuracy of this method is therefore not held-out evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Reply,
    Server,
    algorithms,
    supervised,
)
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.streams import numpy_stream
from perfed.core.tree import Tree, Weights, squared_distance


@algorithms.register("fedfomo")
@dataclass(frozen=True)
class FedFomo(Algorithm):
    candidates: int = option(5, "M: models a client receives", ge=1)
    exploration: float = option(0.3, "ε: chance that candidates are drawn at random", ge=0, le=1)
    exploration_decay: float = option(0.05, "how much ε falls each round", ge=0)

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        bank = state.get("bank", {}).get(client.architecture, {})
        senders = self.choose(server, state, client)
        return Message(candidates={str(n): bank[sender] for n, sender in enumerate(senders)})

    def choose(self, server: Server, state: Tree, client: ClientInfo) -> list[str]:
        """Whose models a client gets: ε-greedy, ties in random order."""
        bank = state.get("bank", {}).get(client.architecture, {})
        available = [sender for sender in bank if int(sender) != client.id]
        random = numpy_stream(server.seed, "server/candidates", client.id, server.round)
        explore = random.random() < self.exploration - self.exploration_decay * server.round
        liking = state.get("affinity", {}).get(str(client.id), {})
        scores = [0.0 if explore else float(liking.get(sender, 0.0)) for sender in available]
        order = np.lexsort((random.random(len(available)), -np.array(scores)))
        return sorted((available[n] for n in order[: self.candidates]), key=int)

    def client_round(self, client: Client, message: Message) -> Message:
        candidates: list[Weights] = list(message.get("candidates", {}).values())
        amounts = torch.zeros(len(candidates))
        if candidates:
            amounts = self.weigh(client, candidates)
            client.weights = mix(client.weights, candidates, amounts)
        client.weights = client.sgd(client.weights, supervised)
        return Message(model=client.weights, amounts=amounts)

    def weigh(self, client: Client, candidates: list[Weights]) -> Tensor:
        """How much of each candidate: non-negative, summing to one, or all zero."""
        own = client.loss(client.weights, "validation")
        gains = []
        for candidate in candidates:
            gain = own - client.loss(candidate, "validation")
            distance = squared_distance(candidate.params, client.weights.params).sqrt()
            # A candidate equal to the own model gains nothing, whatever the distance.
            gains.append(gain / distance.clamp(min=torch.finfo(distance.dtype).tiny))
        positive = torch.stack(gains).clamp(min=0)
        total = positive.sum()
        shares: Tensor = torch.where(total > 0, positive / total, torch.zeros_like(positive))
        return shares

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        bank: Tree = {}
        affinity = dict(state.get("affinity", {}))
        for reply in replies:
            sender = str(reply.client.id)
            bank.setdefault(reply.client.architecture, {})[sender] = reply.message["model"]
            liking = dict(affinity.get(sender, {}))
            senders = self.choose(server, state, reply.client)  # as it was when they were sent
            for other, amount in zip(senders, reply.message["amounts"], strict=True):
                liking[other] = liking.get(other, 0.0) + amount
            if liking:
                affinity[sender] = liking
        return {"bank": bank, "affinity": affinity}


def mix(own: Weights, others: list[Weights], amounts: Tensor) -> Weights:
    """own + Σ amount·(other − own), for parameters and buffers."""

    def moved(mine: Tensor, theirs: list[Tensor]) -> Tensor:
        total = mine.to(amounts.dtype)
        for amount, tensor in zip(amounts, theirs, strict=True):
            total = total + amount * (tensor - mine)
        return (total if mine.is_floating_point() else total.round()).to(mine.dtype)

    return Weights(
        *(
            {name: moved(part[name], [other[name] for other in parts]) for name in part}
            for part, *parts in zip(own, *others, strict=True)
        )
    )
