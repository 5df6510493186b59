"""FedFomo (Zhang et al. 2021): each client mixes the models that help on its validation data.

A selected client gets up to M models that other clients of its architecture sent when they were
last selected. With θ_k its own model as it was *before* its last training, it weighs every one of
them, and its own trained model, by

    (L_k(θ_k) − L_k(θ_n)) / ‖θ_n − θ_k‖,   L_k the loss on its validation data,

cuts negatives to zero, normalises, and takes the weighted mean. Where none helps it goes back to
θ_k, as in the authors' code; with ``fallback: trained`` it keeps its trained model instead. Then it
trains, and sends its model and the weights it gave.

The server chooses candidates ε-greedily, one after another: with chance ε at random, else the one
with the highest affinity, the sum of the weights this client ever gave it. ε=0.3 falls by 0.05 a
round, as in the authors' code. M=5 is ours: that code's default is 8, its examples have 4. Its
affinity also counts how much a model harms; here it counts what a client gave. BatchNorm's buffers
are mixed like parameters. Uses the validation part, never test: the validation accuracy of this
method is not held-out evidence, unless half of it is kept from it (``split.second_validation``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perfed.algorithms.fedavg import by_architecture
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Reply,
    Server,
    algorithms,
    supervised,
)
from perfed.core.declaration import Array, AsMany, AtMost, Messages, Model, Numbered, Reals
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.streams import numpy_stream
from perfed.core.tree import Tree, Weights, flatten, unflatten


@algorithms.register("fedfomo")
@dataclass(frozen=True)
class FedFomo(Algorithm):
    candidates: int = option(5, "M: models a client receives", ge=1)
    exploration: float = option(0.3, "ε: chance that candidates are drawn at random", ge=0, le=1)
    exploration_decay: float = option(0.05, "how much ε falls each round", ge=0)
    fallback: Literal["before", "trained"] = option(
        "before", "where no model helps: go on from the own one before its last training, or after"
    )

    sends = "weights"
    not_private = "chooses what it sends by its validation samples, which no noise covers"
    uses_validation = True

    def messages(self) -> Messages:
        amounts = Array((AsMany("candidates"),), Reals(0, 1))
        return Messages(
            up={"model": Model(), "amounts": amounts},
            down={"candidates": Numbered(Model(), AtMost(self.candidates))},
            evaluation={},
        )

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        bank = state.get("bank", {}).get(client.architecture, {})
        senders = self.choose(server, state, client)
        return Message(candidates={str(n): bank[sender] for n, sender in enumerate(senders)})

    def choose(self, server: Server, state: Tree, client: ClientInfo) -> list[str]:
        """Whose models a client gets."""
        bank = state.get("bank", {}).get(client.architecture, {})
        liking = state.get("affinity", {}).get(str(client.id), {})
        random = numpy_stream(server.seed, "server/candidates", client.id, server.round)
        available = [sender for sender in bank if int(sender) != client.id]
        available = [available[n] for n in random.permutation(len(available))]  # ties at random
        available.sort(key=lambda sender: -float(liking.get(sender, 0.0)))
        chance = self.exploration - self.exploration_decay * server.round
        chosen: list[str] = []
        while available and len(chosen) < self.candidates:
            explore = random.random() < chance
            chosen.append(available.pop(int(random.integers(len(available))) if explore else 0))
        return chosen

    def client_round(self, client: Client, message: Message) -> Message:
        received: list[Weights] = list(message.get("candidates", {}).values())
        amounts = torch.zeros(len(received))
        if received:
            before: Weights = client.state.get("before", client.weights)
            shares = self.weigh(client, before, [client.weights, *received])
            client.weights = mix([before, client.weights, *received], shares)
            amounts = shares[2:]
        start = client.weights
        client.weights = client.sgd(start, supervised)
        client.state = {"before": start}
        return Message(model=client.weights, amounts=amounts)

    def weigh(self, client: Client, before: Weights, candidates: list[Weights]) -> Tensor:
        """The share of ``before``, and of each candidate, the first being the client's own."""
        losses = client.losses([before, *candidates], "validation")
        distances = torch.stack([distance_between(model, before) for model in candidates])
        # A candidate equal to the reference gains nothing, whatever the distance.
        gains = (losses[0] - losses[1:]) / distances.clamp(min=torch.finfo(distances.dtype).tiny)
        positive = torch.cat([torch.zeros_like(losses[:1]), gains.clamp(min=0)])
        total = positive.sum()
        own = torch.zeros_like(positive)
        own[0 if self.fallback == "before" else 1] = 1
        shares: Tensor = torch.where(total > 0, positive / total, own)
        return shares

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        bank = dict(state.get("bank", {}))
        bank |= {architecture: {} for architecture in by_architecture(replies)}
        affinity = dict(state.get("affinity", {}))
        for reply in replies:
            sender = str(reply.client.id)
            bank[reply.client.architecture][sender] = reply.message["model"]
            liking = dict(affinity.get(sender, {}))
            senders = self.choose(server, state, reply.client)  # as it was when they were sent
            for other, amount in zip(senders, reply.message["amounts"], strict=True):
                liking[other] = liking.get(other, 0.0) + amount
            if liking:
                affinity[sender] = liking
        return {"bank": bank, "affinity": affinity}


# Of large models many are compared and mixed in a round. On a GPU an operation on one tensor takes
# longer to start than to do: torch's operations on lists of tensors start once for all of them.


def distance_between(left: Weights, right: Weights) -> Tensor:
    """‖left − right‖ over all parameters."""
    names = [name for name, param in left.params.items() if param.is_floating_point()]
    differences = torch._foreach_sub(
        [left.params[name] for name in names], [right.params[name] for name in names]
    )
    distance: Tensor = torch.stack(torch._foreach_norm(differences)).norm()
    return distance


def mix(models: list[Weights], shares: Tensor) -> Weights:
    """The mean of models by shares that sum to one, buffers included."""
    flat = [flatten({"model": model}) for model in models]
    totals: tuple[Tensor, ...] = ()
    for share, tensors in zip(shares, flat, strict=True):
        weighted = torch._foreach_mul([_floating(tensors[name]) for name in flat[0]], share)
        totals = torch._foreach_add(totals, weighted) if totals else weighted
    mixed = {
        name: (total if tensor.is_floating_point() else total.round()).to(tensor.dtype)
        for (name, tensor), total in zip(flat[0].items(), totals, strict=True)
    }
    model: Weights = unflatten(mixed)["model"]
    return model


def _floating(tensor: Tensor) -> Tensor:
    """A count, of BatchNorm's batches say, as a number that can be averaged."""
    return tensor if tensor.is_floating_point() else tensor.to(torch.get_default_dtype())
