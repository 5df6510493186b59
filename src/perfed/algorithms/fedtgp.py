"""FedTGP (Zhang et al. 2024): FedProto, but the server learns its prototypes.

Paper: *FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for
Data and Model Heterogeneity in Federated Learning*, AAAI 2024. The server has a vector for each
class and a small network (F → F → F) that makes the global prototypes of them. It trains both so
that each client's prototype is nearer to the global one of its class than to all others, by a
margin. Clients do as in FedProto.

The variant is that of the authors' code, with the values of the script that they publish: λ = 10,
100 epochs on the server, SGD of rate 0.01, 10 prototypes a step, a margin of at most 100. There the
margin is the largest distance of a class from its nearest other class, between plain means of
clients' prototypes. With fewer than two classes it is the upper limit. The server's network
is kept from round to round.

Where this differs from the code:

* Distances are computed from differences. The code takes the root of a difference of sums, which
  may be negative by rounding, and then is no number.
* A class that no client ever sent is never predicted. The code sends a prototype for it, which was
  only ever pushed away.
* The server's rate is an option of its own. The code uses that of clients, which is the same there.
* Before the first prototypes there are, a client is evaluated by its own head; in the code it is
  not evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, one_hot

from perfed.algorithms.class_means import (
    Parameters,
    descended,
    labelled_prototypes,
    present,
    received,
    received_prototypes,
    shuffled_batches,
)
from perfed.algorithms.fedproto import FedProto
from perfed.core.algorithm import Client, Reply, Server, algorithms
from perfed.core.schema import option
from perfed.core.streams import torch_stream
from perfed.core.tree import Tree


@algorithms.register("fedtgp")
@dataclass(frozen=True)
class FedTGP(FedProto):
    weight: float = option(10.0, "weight of nearness to the prototypes", symbol="λ", ge=0)
    margin: float = option(100.0, "upper limit of the margin", symbol="τ", ge=0)
    epochs: int = option(100, "the server's passes over the prototypes, a round", symbol="S", ge=1)
    rate: float = option(0.01, "the server's learning rate", gt=0)
    batch_size: int = option(10, "prototypes a step of the server", ge=1)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        prototypes, labels = labelled_prototypes(replies)
        classes, width = replies[0].message["prototypes"].shape
        network = state["network"] if state else initial_network(server, classes, width)
        network = {name: t.to(prototypes) for name, t in network.items()}
        network = self.trained(server, network, prototypes, labels, self.margin_between(replies))
        known = present(received(replies, "counts")).any(0).to(prototypes)
        if state:
            known = torch.maximum(known, state["known"].to(known))
        made = torch.where(known[:, None] > 0, generated(network), 0.0)
        return {"network": network, "prototypes": made, "known": known}

    def margin_between(self, replies: Sequence[Reply]) -> float:
        """The largest distance of a class from its nearest other, of clients' mean prototypes."""
        has, prototypes = present(received(replies, "counts")), received_prototypes(replies)
        clients = has.sum(0)
        means = (has[..., None] * prototypes).sum(0)[clients > 0] / clients[clients > 0][:, None]
        if len(means) < 2:
            return self.margin
        distances = distances_between(means, means).fill_diagonal_(float("inf"))
        return min(float(distances.min(1).values.max()), self.margin)

    def trained(
        self, server: Server, network: Parameters, rows: Tensor, labels: Tensor, margin: float
    ) -> Parameters:
        def loss(network: Parameters, batch: Tensor) -> Tensor:
            own = labels[batch]
            distances = distances_between(rows[batch], generated(network))
            return cross_entropy(-distances - margin * one_hot(own, distances.shape[1]), own)

        random = server.random("prototypes")
        batches = shuffled_batches(rows, self.epochs, self.batch_size, random)
        return descended(network, loss, batches, self.rate)

    def candidates(self, client: Client, known: Tensor) -> Tensor:
        """All known classes, as in the authors' code."""
        return known


def initial_network(server: Server, classes: int, width: int) -> Parameters:
    """A vector for each class, and two layers, as PyTorch starts them."""
    with torch_stream(server.seed, "server/prototypes"):
        vectors, hidden = nn.Embedding(classes, width), nn.Linear(width, width)
        network = nn.ModuleDict(
            {"vectors": vectors, "hidden": hidden, "last": nn.Linear(width, width)}
        )
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


def generated(network: Parameters) -> Tensor:
    """The global prototypes, N×F."""
    hidden = linear(network["vectors.weight"], network["hidden.weight"], network["hidden.bias"])
    return linear(hidden.relu(), network["last.weight"], network["last.bias"])


def distances_between(left: Tensor, right: Tensor) -> Tensor:
    """From each row to each, by their differences: exact, and with a gradient of 0 at 0."""
    return torch.cdist(left, right, compute_mode="donot_use_mm_for_euclid_dist")
