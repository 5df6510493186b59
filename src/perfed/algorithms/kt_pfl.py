"""KT-pFL (Zhang et al. 2021): the server learns how much each client should listen to each other.

Zhang, Guo, Ma, Wang, Xu, Wu: *Parameterized Knowledge Transfer for Personalized Federated
Learning*, NeurIPS 2021. Clients send soft decisions s_m on public samples, softened by a
temperature. Row n of the knowledge coefficient matrix c (K×K) says how much client n takes from
each of the K clients: its teacher is t_n = Σ_m c_nm s_m. The server moves each row a step down the
gradient of

    KL(t_n ‖ s_n), mean over the public samples,  +  ρ Σ_m (c_nm − 1/K)².

The first term draws a row to the clients that say the same, in the end to n itself. The second
keeps it near the plain mean. In a round a client distils from its teacher, trains on its own data,
and sends what it then says: the order of the authors' code.

Clients that are not selected. The paper has all clients in every round. Here the server keeps the
last soft decisions of each client that has ever answered, and teachers are made of all of these. A
row moves in the rounds in which its client answers. K is the number of clients that have answered.
One that answers for the first time gets a share of 1/K in every row, the others' shares shrink
alike, and its own row is the plain mean. Who has not answered yet, and is selected, is taught by
the plain mean; in the first round by nobody, and clients only train.

Where it differs from the paper or from the authors' code (the code was read; of the paper the
abstract, and how others write its equations):

- The divergence for c is the paper's KL. Their code takes a mean squared error.
- A row stays a mean: after each step it is projected on the simplex. Their code takes the softmax
  of 5 c instead, which draws every row back to 1/K.
- The step size of c is an option. Their code multiplies or divides it by 5 until the gradient has a
  certain size. Others who follow the paper's equations have 0.01, with which c hardly moves. The
  default here is ours.
- A client's share of all samples does not scale its row's step, as in their code. The paper's
  formula has it.
- Distillation is the mean over samples of the divergence. Their code divides it by the number of
  classes as well. The paper's λ is not in their code, and not here: distillation has its own steps.
- They pass over all public samples once, 5,000 in batches of 256. Here the steps are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.algorithms.lessons import learn
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    Network,
    Private,
    Public,
    Reply,
    Server,
    algorithms,
)
from perfed.core.declaration import PROBABILITIES, Array, Maybe, Messages
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree

SMALLEST_PROBABILITY = 1e-12  # what a codec rounded to zero still has a logarithm


@algorithms.register("kt-pfl")
@dataclass(frozen=True)
class KTpFL(Algorithm):
    digest_steps: int = option(20, "distillation steps a round, before the private ones", ge=0)
    temperature: float = option(
        10.0, "what soft decisions are softened by, here and in distillation", symbol="T", gt=0
    )
    pull: float = option(0.7, "weight of staying near the plain mean", symbol="ρ", ge=0)
    coefficient_rate: float = option(0.1, "step size of the coefficients", ge=0)

    sends = "outputs on public samples"
    needs_public_set = trains_on_public_set = True

    def messages(self) -> Messages:
        decisions = Array(("P", "N"), PROBABILITIES)
        return Messages(
            up={"soft_decisions": decisions}, down={"teacher": Maybe(decisions)}, evaluation={}
        )

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        sent = {reply.client.id: reply.message["soft_decisions"] for reply in replies}
        bank = state.get("bank", {}) | {str(client): said for client, said in sent.items()}
        known: list[int] = state["order"].tolist() if state else []
        order = known + [client for client in sent if client not in known]
        decisions = torch.stack([bank[str(client)] for client in order])
        coefficients = widened(state.get("coefficients"), decisions)
        for client in sent:
            own = order.index(client)
            coefficients[own] = self.moved(coefficients[own], decisions, own)
        return {"bank": bank, "order": torch.tensor(order), "coefficients": coefficients}

    def moved(self, row: Tensor, decisions: Tensor, own: int) -> Tensor:
        """A row of coefficients after one step."""
        shares, said = row.double(), decisions.double()
        gradient = divergence_gradient(shares, said, said[own])
        gradient = gradient + 2 * self.pull * (shares - 1 / len(shares))
        return PROBABILITIES.nearest(shares - self.coefficient_rate * gradient).to(row)

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        if not state:
            return Message()
        order = state["order"].tolist()
        decisions = torch.stack([state["bank"][str(other)] for other in order])
        if client.id in order:
            return Message(teacher=mixed(state["coefficients"][order.index(client.id)], decisions))
        return Message(teacher=decisions.mean(0))

    def client_round(self, client: Client, message: Message) -> Message:
        lesson = [message["teacher"]] if "teacher" in message else []
        client.weights = learn(client, client.weights, self.digest, lesson, self.digest_steps)
        return Message(soft_decisions=(client.logits() / self.temperature).softmax(1))

    def digest(self, model: Network, private: Private, public: Public, teacher: Tensor) -> Tensor:
        """The divergence, up to the teacher's entropy, which no student can change."""
        return cross_entropy(model.public(public.x) / self.temperature, teacher[public.index])

    def describe(self, before: Tree, state: Tree) -> dict[str, Any]:
        """How much of their teachers clients are themselves; at first it is one part in K."""
        return {"own_coefficient": float(state["coefficients"].diagonal().mean())}


def widened(coefficients: Tensor | None, decisions: Tensor) -> Tensor:
    """Room for clients that answered for the first time: a share of 1/K of each in every row."""
    clients = len(decisions)
    wide = decisions.new_full((clients, clients), 1 / clients)
    if coefficients is not None:
        before = len(coefficients)
        wide[:before, :before] = coefficients * (before / clients)
    return wide


def mixed(row: Tensor, decisions: Tensor) -> Tensor:
    """The mean of soft decisions (m, |P|, N) by a row of coefficients."""
    return torch.einsum("m,mpn->pn", row, decisions)


def divergence_gradient(shares: Tensor, decisions: Tensor, own: Tensor) -> Tensor:
    """Of KL(Σ_m c_m s_m ‖ s), mean over the public samples, with respect to c."""
    teacher = mixed(shares, decisions).clamp(min=SMALLEST_PROBABILITY)
    slope = teacher.log() - own.clamp(min=SMALLEST_PROBABILITY).log() + 1
    return torch.einsum("mpn,pn->m", decisions, slope) / len(own)
