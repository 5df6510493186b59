"""FedKD (Wu et al., Nature Communications 2022): each client's own network, the teacher, and a
small shared one, the student, learn from each other; the student's update crosses in few factors.

Both learn from labels, from each other's opinion, and from how near the student's features come to
the teacher's after a matrix W of the client's own. Opinions and features count the more the smaller
the losses on labels are: they are divided by their sum. Each matrix of an update is cut to the
largest singular values that hold a share T of its energy (the sum of squares), and crosses as two
factors. T rises from 0.95 to 0.98, as in the paper.

What crosses is what is counted. A matrix whose factors would hold as many numbers as itself crosses
as it is, without a cut. A kernel of a convolution is a matrix of output channels × all else. The
rank is the smallest one that reaches T, all of it if need be. (The authors' code and HtFLlib keep
no singular value at all where the last one is needed, and so lose the whole layer.) The server's
student moves by the cut mean update, so that it is the one that clients have. A client that
answered in the last merge is sent only this update; any other is sent the whole student.

Deviations. The paper lets all clients take part, so that nobody misses an update. The authors' code
has hidden and attention layers of BERT without W; here features are what goes into the last layer,
and W is a Linear layer (with a bias). As in their code no gradient is stopped: an opinion is no
constant in the other's loss, nor is the divisor. KL is the mean over samples, not divided by the
classes. T rises over a given number of rounds, for an algorithm does not know how many there are.
Both networks train at the experiment's learning rate. BatchNorm's buffers cross whole, and are
averaged. The student is a small MLP unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from perfed.core.algorithm import (
    Algorithm,
    Between,
    Client,
    ClientInfo,
    Network,
    OfNetwork,
    Predictor,
    Private,
    Reply,
    Server,
    algorithms,
    weighted_average,
)
from perfed.core.declaration import (
    REALS,
    SAMPLES,
    Array,
    AtMost,
    Known,
    Leaf,
    Messages,
    Model,
    Reals,
    Whole,
)
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import OWN, Tree, Weights, escaped
from perfed.models import MLP, Architecture

STUDENT, HIDDEN = "student", "hidden"
LEFT, RIGHT = ":left", ":right"
"""What the names of a matrix's two factors end in."""

Tensors = dict[str, Tensor]


@algorithms.register("fedkd")
@dataclass(frozen=True)
class FedKD(Algorithm):
    student: Architecture = option(MLP((32,)), "the network that all clients share")
    energy_first: float = option(
        0.95, "share of an update's energy that crosses at first", symbol="T_start", gt=0, le=1
    )
    energy_last: float = option(0.98, "and in the end", symbol="T_end", gt=0, le=1)
    rising: int = option(100, "rounds over which this share rises", ge=1)

    sends = "a second network"
    needs_features = evaluated_with_server = True

    def check(self, clients_per_round: int) -> None:
        if self.energy_last < self.energy_first:
            raise ConfigError(
                f"{self.energy_last} is less than energy_first ({self.energy_first}): must be at "
                "least that",
                "energy_last",
            )

    def messages(self) -> Messages:
        update = {"update": Factored(STUDENT)}
        number = Array((), Whole(low=0))
        energy = Array((), Reals(0.0, 1.0))
        return Messages(
            up={**update, "samples": SAMPLES},
            down={**update, "version": number, "whole": number, "energy": energy},
            evaluation={"model": Model(STUDENT)},
        )

    def networks(self) -> Mapping[str, Any]:
        linear = MLP(hidden=())
        return {STUDENT: self.student, HIDDEN: Between(linear, takes=(STUDENT,), gives=OWN)}

    def energy(self, round: int) -> float:
        """T in a round."""
        share = min(1.0, (round + 1) / self.rising)
        return self.energy_first + share * (self.energy_last - self.energy_first)

    def start(self, server: Server) -> Tree:
        return {"model": server.initial(STUDENT, 0), "version": torch.tensor(0)}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        has_last = "answered" in state and client.id in state["answered"].tolist()
        return Message(
            update=state["update"] if has_last else state["model"],
            version=int(state["version"]),
            whole=int(not has_last),
            energy=self.energy(server.round),
        )

    def client_round(self, client: Client, message: Message) -> Message:
        start = received(client.state, message)
        hidden: Weights = client.state.get(HIDDEN) or client.initial(HIDDEN)
        trained = client.sgd(
            {OWN: client.weights, STUDENT: start, HIDDEN: hidden}, distil_each_other
        )
        client.weights = trained[OWN]
        client.state = {
            "model": start,
            "version": message["version"],
            HIDDEN: trained[HIDDEN],
        }
        moved = {n: t - start.params[n] for n, t in trained[STUDENT].params.items()}
        update = factored(moved, float(message["energy"]))
        return Message(update=Weights(update, trained[STUDENT].buffers), samples=client.samples)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        before: Weights = state["model"]
        sent: list[Weights] = [reply.message["update"] for reply in replies]
        weights = [reply.weight for reply in replies]
        moves = [multiplied(update.params, before.params) for update in sent]
        update = factored(weighted_average(moves, weights), self.energy(server.round))
        buffers = weighted_average([one.buffers for one in sent], weights)
        return {
            "model": Weights(moved_by(before.params, update), buffers),
            "version": state["version"] + 1,
            "update": Weights(update, buffers),
            "answered": torch.tensor([reply.client.id for reply in replies]),
        }

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(model=state["model"])

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        return {"personal": client.weights, "global": OfNetwork(message["model"], STUDENT)}


def distil_each_other(models: Mapping[str, Network], private: Private, public: None) -> Tensor:
    """The teacher's loss and the student's."""
    own, student = models[OWN].features(private.x), models[STUDENT].features(private.x)
    teaching, learning = models[OWN].head(own), models[STUDENT].head(student)
    labels = cross_entropy(teaching, private.y) + cross_entropy(learning, private.y)
    opinions = opinion(teaching, learning) + opinion(learning, teaching)
    hidden = mse_loss(models[HIDDEN](student), own)
    return labels + (opinions + 2 * hidden) / labels  # hidden is in the loss of both


def opinion(student: Tensor, teacher: Tensor) -> Tensor:
    """How far a student is from what the teacher says: KL, with a gradient for both."""
    said, taught = student.log_softmax(1), teacher.log_softmax(1)
    return (taught.exp() * (taught - said)).sum(1).mean()


def received(kept: Tree, message: Message) -> Weights:
    """The student that a client was sent: whole, or as an update of the one it has."""
    update: Weights = message["update"]
    if int(message["whole"]):
        return update
    wanted, have = int(message["version"]), int(kept.get("version", -1))
    if have == wanted:  # its last answer did not arrive, and it is sent the same once more
        model: Weights = kept["model"]
        return model
    if have != wanted - 1:
        raise ConfigError(
            f"is sent an update of student {wanted - 1}, and this client has "
            f"{have if have >= 0 else 'none'}: it goes on from another state than it answered with",
            "fedkd",
        )
    return Weights(moved_by(kept["model"].params, update.params), update.buffers)


def factored(tensors: Mapping[str, Tensor], energy: float) -> Tensors:
    """Each matrix cut to so much of its energy, as two factors where these are smaller."""
    result: Tensors = {}
    for name, tensor in tensors.items():
        factors = None
        if tensor.ndim > 1 and largest_rank(tensor.shape):
            factors = leading_factors(tensor.flatten(1), energy, largest_rank(tensor.shape))
        if factors is None:
            result[name] = tensor
        else:
            result[name + LEFT], result[name + RIGHT] = factors
    return result


def leading_factors(matrix: Tensor, energy: float, most: int) -> tuple[Tensor, Tensor] | None:
    """Two factors of the smallest rank that reaches this share of the energy; None where it is more
    than ``most``, or where training has diverged: what is not finite is then sent, and noticed."""
    if not bool(matrix.isfinite().all()):
        return None
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    held = values.square().cumsum(0)
    rank = min(int((held < energy * held[-1]).sum()) + 1, len(values))
    if rank > most:
        return None
    # The sign of a pair of vectors is free, and would depend on the last bits of the matrix.
    signs = torch.where(right[:rank].sum(1) < 0, -1.0, 1.0).to(values)
    return left[:, :rank] * (signs * values[:rank]), right[:rank] * signs[:, None]


def largest_rank(shape: Sequence[int]) -> int:
    """The largest rank at which two factors hold fewer numbers than the matrix."""
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    return (rows * columns - 1) // (rows + columns)


def multiplied(update: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> Tensors:
    """The inverse of :func:`factored`, up to what was cut."""
    return {
        name: (update[name + LEFT] @ update[name + RIGHT]).view_as(tensor)
        if name + LEFT in update
        else update[name]
        for name, tensor in like.items()
    }


def moved_by(params: Mapping[str, Tensor], update: Mapping[str, Tensor]) -> Tensors:
    return {name: params[name] + t for name, t in multiplied(update, params).items()}


@dataclass(frozen=True)
class Factored(Model):
    """Something for each parameter of a model, a matrix as itself or as two factors that are
    smaller; and running statistics."""

    def words(self) -> str:
        return f"a number for each parameter of '{self.network}', matrices in factors"

    def leaves(self, path: str, message: Message, known: Known) -> dict[str, Leaf]:
        leaves = super().leaves(path, message, known)
        for name, tensor in known.model(self.network).params.items():
            whole = f"{path}/params/{escaped(name)}"
            left = message.arrays.get(whole + LEFT)
            most = largest_rank(tensor.shape) if tensor.ndim > 1 else 0
            if left is None or not most:
                continue
            rows, columns = tensor.flatten(1).shape
            rank = left.shape[-1] if left.ndim else 0
            del leaves[whole]
            leaves[whole + LEFT] = Leaf((rows, AtMost(most)), tensor.dtype, REALS)
            leaves[whole + RIGHT] = Leaf((rank, columns), tensor.dtype, REALS)
        return leaves
