"""FedGen (Zhu et al., ICML 2021, data-free knowledge distillation): the server trains a generator
of features from the clients' heads and label counts, and clients learn from what it generates.

The generator makes features of noise and a label. It is trained so that the clients' heads find the
label, each head counting for a label as its client has samples of it, and so that different noise
gives different features. A client teaches its own head these features and labels (α), and draws its
opinion of a sample to what its head says of features generated for the same label (β).

The variant: networks may differ below the head, so only heads are shared and averaged, as HtFLlib
has it; the authors average whole networks of one kind. Weights, their decay and the generator are
those of the authors' code for MNIST. The generator is part of the server's state, and goes on from
round to round. A client is evaluated with its own head, as it last trained it.

Deviations. A client generates features once a round, equally many of each label that the generator
has learnt, and each step sees all of them: an objective draws no random numbers. The authors draw
new ones each step, of labels drawn uniformly. Adam begins anew in each round; theirs goes on. Their
label counts are of the mini-batches of a round and begin at 1; here a client sends those of its
training data. Weights decay without the authors' lower bound of 1e-4. Their student term of the
generator has weight 0, and is left out. In the first round there is no generator yet, as there.
Label counts cross, which tell the server a client's label mix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import batch_norm, cross_entropy, linear

from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Network,
    Private,
    Reply,
    Server,
    algorithms,
    supervised,
    weighted_average,
)
from perfed.core.declaration import (
    COUNTS,
    REALS,
    SAMPLES,
    VARIANCES,
    Array,
    Dimension,
    Entry,
    Known,
    Leaf,
    Maybe,
    Messages,
    PerParameter,
    Reals,
)
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.streams import torch_stream
from perfed.core.tree import Tree, Weights


@algorithms.register("fedgen")
@dataclass(frozen=True)
class FedGen(Algorithm):
    weight: float = option(10.0, "weight of the loss on generated features", symbol="α", ge=0)
    agreement: float = option(
        10.0, "weight of agreement with generated features of the same label", symbol="β", ge=0
    )
    decay: float = option(
        0.98, "factor a round of both weights and of the generator's rate", gt=0, le=1
    )
    generated: int = option(8, "features of each label that a client generates a round", ge=1)
    diversity: float = option(1.0, "weight of the generator's diversity", symbol="η", ge=0)
    steps: int = option(50, "training steps of the generator a round", ge=0)
    rate: float = option(3e-4, "Adam's learning rate for the generator", gt=0)
    shrinkage: float = option(0.01, "the generator's weight decay", ge=0)
    batch_size: int = option(32, "features a step of the generator", ge=2)
    noise: int = option(32, "numbers of noise for one feature vector", ge=1)
    hidden: int = option(256, "hidden units of the generator", ge=1)

    sends = "parts of networks"
    not_private = "sends its label counts, which no noise covers"
    needs_features = shares_features = True

    def messages(self) -> Messages:
        head, counts = PerParameter("head"), Array(("N",), COUNTS)
        down = {
            "head": head,
            "generator": GeneratorWeights(self.noise, self.hidden),
            "labels": Array(("N",), Reals(0.0, 1.0)),
            "strength": Array((), Reals(0.0, 1.0)),
        }
        return Messages(
            up={"head": head, "counts": counts, "samples": SAMPLES},
            down={name: Maybe(entry) for name, entry in down.items()},
            evaluation={},
        )

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(**state, strength=self.decay**server.round) if state else Message()

    def client_round(self, client: Client, message: Message) -> Message:
        if message:
            start = client.with_head(client.weights, message["head"])
            features = self.features(message["generator"], message["labels"])
            # A number crosses on the CPU; a stack is on one device.
            inputs = (features, message["labels"], message["strength"].to(features))
            client.weights = client.sgd(start, self.objective, *inputs)
        else:
            client.weights = client.sgd(client.weights, supervised)
        return Message(
            head=client.head_of(client.weights),
            counts=client.label_counts().to(torch.get_default_dtype()),
            samples=client.samples,
        )

    @torch.no_grad()
    def features(self, generator: Weights, labels: Tensor) -> Tensor:
        """Generated features by label, N×generated×F."""
        classes = len(labels)
        noise = torch.rand(classes * self.generated, self.noise).to(labels)  # the client's stream
        wanted = torch.eye(classes).to(labels).repeat_interleave(self.generated, 0)
        made = generate(generator, noise, wanted, training=False)
        return made.view(classes, self.generated, -1)

    def objective(
        self,
        model: Network,
        private: Private,
        public: None,
        generated: Tensor,
        labels: Tensor,
        strength: Tensor,
    ) -> Tensor:
        logits = model(private.x)
        said = model.head(generated.flatten(0, 1)).view(*generated.shape[:2], -1).log_softmax(2)
        right = said.diagonal(dim1=0, dim2=2).mean(0)  # by label: of what was made for it
        taught = -(right * labels).sum() / labels.sum()
        opinions = said.exp().mean(1).detach()[private.y]
        agreed = -(opinions * logits.log_softmax(1)).sum(1) * labels[private.y]
        learnt = self.weight * taught + self.agreement * agreed.mean()
        return cross_entropy(logits, private.y) + strength * learnt

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        heads = [linear_head(reply) for reply in replies]
        counts = torch.stack([reply.message["counts"] for reply in replies])
        present = (counts.sum(0) > 0).to(counts)
        classes, width = heads[0]["weight"].shape
        generator = state.get("generator") or self.first_generator(server, classes, width)
        labels = torch.maximum(present, state["labels"].to(present)) if state else present
        return {
            "head": weighted_average(heads, [reply.weight for reply in replies]),
            "generator": self.trained(server, generator, heads, counts),
            "labels": labels,
        }

    def first_generator(self, server: Server, classes: int, width: int) -> Weights:
        """Drawn as PyTorch draws Linear layers."""

        def drawn(rows: int, columns: int) -> dict[str, Tensor]:
            bound = 1 / math.sqrt(columns)
            weight, bias = torch.empty(rows, columns), torch.empty(rows)
            return {"weight": weight.uniform_(-bound, bound), "bias": bias.uniform_(-bound, bound)}

        with torch_stream(server.seed, "server/generator"):
            layers = {
                "hidden": drawn(self.hidden, self.noise + classes),
                "norm": {"weight": torch.ones(self.hidden), "bias": torch.zeros(self.hidden)},
                "features": drawn(width, self.hidden),
            }
        params = {f"{layer}.{n}": t for layer, part in layers.items() for n, t in part.items()}
        statistics = {
            "norm.running_mean": torch.zeros(self.hidden),
            "norm.running_var": torch.ones(self.hidden),
        }
        return Weights(params, statistics)

    def trained(
        self, server: Server, generator: Weights, heads: Sequence[Mapping[str, Tensor]],
        counts: Tensor,
    ) -> Weights:  # fmt: skip
        """The generator after this round's steps. ``counts``: clients × labels."""
        generator = Weights(*({n: t.to(counts) for n, t in part.items()} for part in generator))
        generator = generator.clone()
        params = [parameter.requires_grad_() for parameter in generator.params.values()]
        rate = self.rate * self.decay**server.round
        optimizer = torch.optim.Adam(params, lr=rate, weight_decay=self.shrinkage)
        shares = counts / counts.sum(0).clamp(min=1)
        present = counts.sum(0).nonzero()[:, 0].cpu().numpy()
        random = server.random("generator")
        for _ in range(self.steps):
            labels = torch.as_tensor(random.choice(present, self.batch_size), device=counts.device)
            noise = torch.as_tensor(random.random((self.batch_size, self.noise))).to(counts)
            wanted = torch.eye(counts.shape[1]).to(counts)[labels]
            made = generate(generator, noise, wanted, training=True)
            losses = [cross_entropy(said(head, made), labels, reduction="none") for head in heads]
            taught = (torch.stack(losses) * shares[:, labels]).sum(0).mean()
            loss = taught + self.diversity * sameness(noise, made)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return generator.clone()


def generate(generator: Weights, noise: Tensor, labels: Tensor, training: bool) -> Tensor:
    """Features of noise and labels (one-hot), a row each. Training moves running statistics."""
    params, statistics = generator.params, generator.buffers
    given = torch.cat([noise, labels], 1)
    hidden = batch_norm(
        linear(given, params["hidden.weight"], params["hidden.bias"]),
        statistics["norm.running_mean"],
        statistics["norm.running_var"],
        params["norm.weight"],
        params["norm.bias"],
        training,
    )
    return linear(hidden.relu(), params["features.weight"], params["features.bias"])


def sameness(noise: Tensor, features: Tensor) -> Tensor:
    """Near 1 where different noise gives the same features, and less the more they differ."""
    apart = (noise[:, None] - noise[None]).square().mean(2)
    differ = (features[:, None] - features[None]).abs().mean(2)
    return (-apart * differ).mean().exp()


def linear_head(reply: Reply) -> dict[str, Tensor]:
    head: dict[str, Tensor] = reply.message["head"]
    if not {"weight"} <= head.keys() <= {"weight", "bias"}:
        raise ConfigError(
            f"'fedgen' needs a head that is one Linear layer; that of "
            f"'{reply.client.architecture}' has {', '.join(head)}",
            "models",
        )
    return head


def said(head: Mapping[str, Tensor], features: Tensor) -> Tensor:
    return linear(features, head["weight"], head.get("bias"))


@dataclass(frozen=True)
class GeneratorWeights(Entry):
    """The weights of a generator, whose size depends on the data's classes and the clients' width
    of features."""

    noise: int
    hidden: int

    def words(self) -> str:
        return "weights of a generator of features"

    def leaves(self, path: str, message: Message, known: Known) -> dict[str, Leaf]:
        wide, inputs = self.hidden, self.noise + known.sizes["N"]
        shapes: dict[str, tuple[Dimension, ...]] = {
            "params/hidden.weight": (wide, inputs),
            "params/hidden.bias": (wide,),
            "params/norm.weight": (wide,),
            "params/norm.bias": (wide,),
            "params/features.weight": ("F", wide),
            "params/features.bias": ("F",),
            "buffers/norm.running_mean": (wide,),
            "buffers/norm.running_var": (wide,),
        }
        dtype = torch.get_default_dtype()
        return {
            f"{path}/{name}": Leaf(shape, dtype, VARIANCES if name.endswith("var") else REALS)
            for name, shape in shapes.items()
        }
