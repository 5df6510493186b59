"""FedGH (Yi et al. 2023): the server trains one head for all, on clients' class-mean features.

Paper: *FedGH: Heterogeneous Federated Learning with Generalized Global Header*, ACM MM 2023. A
client puts the server's head on its own body, trains both on its labels, and sends the mean
features of each of its classes. The server trains its head to tell these apart, and keeps it from
round to round. Networks may differ in all but their head: one linear layer, with a bias.

The variant is that of the authors' code: in the first round clients have heads of their own; the
server makes one pass of SGD a round, of rate 0.01, with one prototype a step. HtFLlib
makes 100 passes, 10 prototypes a step, and starts with a client's head.

Two models are evaluated. ``personal`` is the one that the client trained last: what the authors'
code evaluates. ``global`` is its body with the server's head: what HtFLlib evaluates.

Where this differs from the authors' code:

* There the step on the server is made by an optimizer that holds a client's network and not the
  head. The head never moves. Here it does.
* That optimizer's momentum and weight decay, and the limit of the gradient's norm (50), are left
  out. The step here is plain SGD.
* There a class's features are the mean of its means in mini-batches. Here they are the mean of all
  training samples of the class, in evaluation mode.
* Prototypes come in a random order, not client by client.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from perfed.algorithms.class_means import (
    PROTOTYPES,
    Parameters,
    class_means,
    descended,
    labelled_prototypes,
    shuffled_batches,
)
from perfed.algorithms.lg_fedavg import LGFedAvg
from perfed.core.algorithm import Client, Reply, Server, algorithms, supervised
from perfed.core.declaration import Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.streams import torch_stream
from perfed.core.tree import Tree


@algorithms.register("fedgh")
@dataclass(frozen=True)
class FedGH(LGFedAvg):
    rate: float = option(0.01, "the server's learning rate", symbol="η_θ", gt=0)
    epochs: int = option(1, "the server's passes over the prototypes, a round", ge=1)
    batch_size: int = option(1, "prototypes a step of the server", ge=1)

    sends = "class means"
    merges_by_mean = False
    not_private = "sends means over its training samples, which no noise covers"

    def messages(self) -> Messages:
        heads = super().messages()
        return Messages(up=PROTOTYPES, down=heads.down, evaluation=heads.evaluation)

    def client_round(self, client: Client, message: Message) -> Message:
        client.weights = client.sgd(self.with_shared_head(client, message), supervised)
        prototypes, counts = class_means(client, client.features())
        return Message(prototypes=prototypes, counts=counts)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        prototypes, labels = labelled_prototypes(replies)
        classes, width = replies[0].message["prototypes"].shape
        start = state["head"] if state else initial_head(server, classes, width)
        head = {name: t.to(prototypes) for name, t in start.items()}

        def loss(head: Parameters, batch: Tensor) -> Tensor:
            logits = linear(prototypes[batch], head["weight"], head["bias"])
            return cross_entropy(logits, labels[batch])

        random = server.random("head")
        batches = shuffled_batches(prototypes, self.epochs, self.batch_size, random)
        return {"head": descended(head, loss, batches, self.rate)}


def initial_head(server: Server, classes: int, width: int) -> Parameters:
    """As PyTorch starts a linear layer."""
    with torch_stream(server.seed, "server/head"):
        layer = nn.Linear(width, classes)
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}
