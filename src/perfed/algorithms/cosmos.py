"""COSMOS (Rachmut et al. 2026): the server trains a model for each cluster of clients.

Rachmut, Ge, Zhang, Yeoh, Vorobeychik: *COSMOS: Model-Agnostic Personalized Federated Learning with
Clustered Server Models and Pseudo-Label-Only Communication*, arXiv 2605.11165. Clients send their
soft decisions on public samples. The server

1. groups the clients once, after their first training, by the distance of what they say. The client
   that has most others within a distance B founds a cluster with these; then the same among those
   that are left (Algorithm 1, greedy elimination);
2. trains a network of its own for each cluster towards the mean of what the cluster's clients say;
3. sends each client what its cluster's network says: its pseudo-labels.

A client distils from these, trains on its own data, and sends again.

Where it comes from: the paper's abstract, and the README and code of its authors (where the method
is called MAPL). The paper's own text was not at hand. These are guesses or choices of ours:

- B. In their code it grows until there are at most so many clusters as there truly are groups. Here
  the option ``clusters`` is that number, and B the first distance of a pair at which it is reached.
- Clients that are not selected. Theirs all take part. Here the clients of the first round are
  clustered. Who answers later for the first time joins the cluster whose mean is nearest. The
  server keeps the last soft decisions of each client, and a cluster's mean is over all its clients.
  A network is trained in the rounds in which one of its clients answers. A client without a cluster
  gets nothing, and only trains.
- The smoothness regularizer, λ. Their code takes the mean squared difference between what the
  network says with and without a little noise on its inputs, but without a gradient, so that it
  changes nothing. Here it has one. Their noise has a standard deviation of 0.05 for pixels from 0
  to 1; here it is 0.05 of the public set's. Samples that are not numbers get none.
- Their code weighs public samples, in a client's distillation, by how often the client has their
  *true* label. The public set has no labels here, so all count the same.
- The server makes 1,560 steps a round with Adam at 1e-4 in their setting; here 100 at 1e-3, which
  go about as far. The gradient's norm is cut at 1, as theirs is, at the server only.
- Their clients use Adam; here clients use the optimizer of the experiment. Their client starts anew
  where its accuracy is that of chance, by test data; here it does not.
- Their loops drop the last public mini-batch. Here all public samples are drawn alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy, mse_loss

from perfed.algorithms.lessons import imitate, learn
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Reply,
    Server,
    algorithms,
    trainable,
)
from perfed.core.declaration import PROBABILITIES, Array, Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.streams import stream_key, torch_stream, uniform_indices
from perfed.core.tree import Tree, Weights
from perfed.models import Architecture

NOISE = 0.05
LONGEST_GRADIENT = 1.0
AT_ONCE = 1024  # public samples that a network is asked about


@algorithms.register("cosmos")
@dataclass(frozen=True)
class Cosmos(Algorithm):
    clusters: int = option(5, "most clusters of the clients of the first round", symbol="c", ge=1)
    digest_steps: int = option(50, "distillation steps a round, before the private ones", ge=0)
    network: Architecture = option("mlp", "the clusters' network, which only the server has")
    steps: int = option(100, "training steps of a cluster's network in a round", ge=0)
    rate: float = option(1e-3, "Adam's learning rate for them", gt=0)
    batch_size: int = option(32, "public samples in each of them", ge=1)
    smoothness: float = option(5.0, "weight of the smoothness regularizer", symbol="λ", ge=0)

    sends = "outputs on public samples"
    needs_public_set = trains_on_public_set = True

    def networks(self) -> Mapping[str, Any]:
        return {"server": self.network}

    def messages(self) -> Messages:
        decisions = Array(("P", "N"), PROBABILITIES)
        return Messages(
            up={"soft_decisions": decisions},
            down={"pseudo_labels": Maybe(decisions)},
            evaluation={},
        )

    # Clients.
    def client_round(self, client: Client, message: Message) -> Message:
        lesson = [message["pseudo_labels"]] if "pseudo_labels" in message else []
        client.weights = learn(client, client.weights, imitate, lesson, self.digest_steps)
        return Message(soft_decisions=client.soft_decisions())

    # The server.
    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        sent = {str(reply.client.id): reply.message["soft_decisions"] for reply in replies}
        bank = state.get("bank", {}) | sent
        member = self.members(bank, {k: int(c) for k, c in state.get("cluster", {}).items()})
        models, labels = dict(state.get("models", {})), dict(state.get("labels", {}))
        for number in sorted({member[client] for client in sent}):
            own, name = [bank[k] for k in bank if member[k] == number], str(number)
            before = models.get(name) or server.initial("server", number)
            models[name] = self.trained(server, number, before, torch.stack(own).mean(0))
            labels[name] = soft_labels(server, models[name])
        cluster = {client: torch.tensor(number) for client, number in member.items()}
        return {"bank": bank, "cluster": cluster, "models": models, "labels": labels}

    def members(self, bank: Mapping[str, Tensor], known: Mapping[str, int]) -> dict[str, int]:
        """The cluster of each client, also of those that answer for the first time."""
        if not known:
            found = greedy_clusters(torch.stack([*bank.values()]), self.clusters)
            return dict(zip(bank, found, strict=True))
        means = torch.stack(
            [
                torch.stack([bank[k] for k, c in known.items() if c == number]).mean(0)
                for number in range(max(known.values()) + 1)
            ]
        )
        nearest = {
            client: int((means - said).square().flatten(1).sum(1).argmin())
            for client, said in bank.items()
            if client not in known
        }
        return dict(known) | nearest

    def trained(self, server: Server, number: int, weights: Weights, target: Tensor) -> Weights:
        """A cluster's network after the round's steps towards what its clients say."""
        if not self.steps:
            return weights
        module, student, public = server.modules["server"].train(), weights.clone(), server.public_x
        params = list(trainable(module, student).values())
        optimizer = torch.optim.Adam(params, lr=self.rate)
        purpose = f"server/cosmos/{number}"
        key = stream_key(server.seed, purpose, round=server.round)
        batches = uniform_indices(key, (self.steps, self.batch_size), len(public), public.device)
        noise = NOISE * public.std() if public.is_floating_point() else None

        def said(x: Tensor) -> Tensor:
            logits: Tensor = functional_call(module, student.params | student.buffers, (x,))
            return logits

        with torch_stream(server.seed, purpose, round=server.round):  # for noise and dropout
            for batch in batches:
                loss = self.server_loss(said, public[batch], target[batch], noise)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(params, LONGEST_GRADIENT)
                optimizer.step()
        return student.clone()

    def server_loss(
        self, said: Callable[[Tensor], Tensor], x: Tensor, target: Tensor, noise: Tensor | None
    ) -> Tensor:
        """The divergence, and how much a little noise of this size changes what is said."""
        logits = said(x)
        loss = cross_entropy(logits, target)
        if self.smoothness == 0 or noise is None:
            return loss
        moved = said(x + noise * torch.randn_like(x))
        return loss + self.smoothness * mse_loss(moved.softmax(1), logits.softmax(1))

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        cluster = state.get("cluster", {}).get(str(client.id))
        if cluster is None:
            return Message()
        return Message(pseudo_labels=state["labels"][str(int(cluster))])

    def describe(self, before: Tree, state: Tree) -> dict[str, Any]:
        """How many clients each cluster has."""
        found = [int(number) for number in state["cluster"].values()]
        return {"cluster_sizes": [found.count(number) for number in range(max(found) + 1)]}

    def placed(self, state: Tree, replies: Sequence[Reply]) -> dict[int, int]:
        return {reply.client.id: int(state["cluster"][str(reply.client.id)]) for reply in replies}


@torch.no_grad()
def soft_labels(server: Server, weights: Weights) -> Tensor:
    """What a cluster's network says of the public samples, in evaluation mode."""
    module, tensors = server.modules["server"].eval(), weights.params | weights.buffers
    batches = torch.split(server.public_x, AT_ONCE)
    return torch.cat([functional_call(module, tensors, (x,)).softmax(1) for x in batches])


def greedy_clusters(decisions: Tensor, most: int) -> list[int]:
    """The cluster of each of m clients, by soft decisions (m, |P|, N): at most so many clusters.

    The distance B is searched among those of all pairs, by bisection: with the next smaller one
    there would be more clusters.
    """
    rows = decisions.flatten(1).double()
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    candidates = sorted({*distances.flatten().tolist()})  # from 0, each by itself, to all in one
    found = bisect_left(
        candidates, -most, key=lambda distance: -max(eliminated(distances <= distance)) - 1
    )
    return eliminated(distances <= candidates[found])


def eliminated(near: Tensor) -> list[int]:
    """Clusters by who is near whom (m×m): the one with most neighbours left takes them all."""
    left = torch.ones(len(near), dtype=torch.bool, device=near.device)
    found, number = torch.zeros(len(near), dtype=torch.long), 0
    while bool(left.any()):
        neighbours = torch.where(left, (near & left).sum(1), -1)
        taken = near[int(neighbours.argmax())] & left
        found[taken.cpu()] = number
        left, number = left & ~taken, number + 1
    return found.tolist()
