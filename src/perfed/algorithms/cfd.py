"""CFD (Sattler et al. 2020): federated distillation in few bits, through a student at the server.

Sattler, Marban, Rischke, Samek: *CFD: Communication-Efficient Federated Distillation via Soft-Label
Quantization and Delta Coding*. Three ideas:

* *Quantised*: soft labels on the public set go up and down in few bits. The constrained quantiser
  keeps each row a distribution; with one bit it is the hard label.
* *Delta coding*: only those labels are sent that the other end does not have already.
* *Dual distillation*: the server distils the clients' mean labels into a student of its own. What
  goes down are the student's labels, not the mean; ``student_steps: 0`` sends the mean itself.

In a round a client imitates the student on public samples, trains on its own samples, and sends
its labels. The client's own model is evaluated, and the student as the global one. A client gets
the student's weights for its evaluation only.

Which variant, and what differs from the paper and its authors' code:

* They count the entropy of the changes; their public code has no coder. Here a label that has not
  changed costs one bit, and one that has costs one and its own, as real bytes.
* A change is one since the last round in which the server got the client's answer. The server says
  which, so a lost answer costs bytes and no label. Labels are sent as they are, not as differences.
* Their clients begin each round with a new network, the same for all, after 2,000 steps of
  imitation. Here a client goes on with its own model, as personalized methods do, and makes as many
  steps on public samples as on private ones; ``begin: initial`` begins with its first one.
* Their student keeps Adam's state between rounds, and speaks in training mode. Here Adam begins
  anew each round, and the student's labels are made in evaluation mode.
* They can also choose the public samples that are most uncertain. Here all are used.
* As in their code, b_up = b_down = 1 and 500 steps of Adam for the student; KL is averaged over
  samples and not over classes. Nobody imitates anything before the first merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from perfed.algorithms.feddf import distilled, public_logits
from perfed.algorithms.label_coding import FULL, MOST, LabelCode
from perfed.algorithms.lessons import imitate, learn
from perfed.core.algorithm import (
    Algorithm,
    Client,
    ClientInfo,
    OfNetwork,
    Predictor,
    Reply,
    Server,
    algorithms,
)
from perfed.core.declaration import Array, Maybe, Messages, Model, Whole
from perfed.core.errors import ConfigError
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree, Weights
from perfed.models import Architecture

STUDENT = "student"
NEVER = -1  # the round of what has not happened


@algorithms.register("cfd")
@dataclass(frozen=True)
class CFD(Algorithm):
    bits_up: int = option(
        1, "bits of a client's labels: 1 to 8, or 32 for all of them", symbol="b↑", ge=1
    )
    bits_down: int = option(
        1, "bits of the server's labels: 1 to 8, or 32 for all of them", symbol="b↓", ge=1
    )
    student: Architecture = option("mlp", "the server's network")
    student_steps: int = option(
        500, "steps a round of the server's student; 0: no student, clients imitate the mean", ge=0
    )
    rate: float = option(1e-3, "Adam's learning rate for the student", gt=0)
    batch_size: int = option(128, "public samples in a step of the student", ge=1)
    distil_steps: int | None = option(
        None, "steps a round on public samples; null: as many as on private ones", ge=0
    )
    begin: Literal["own", "initial"] = option(
        "own", "what a client begins a round with: its own model, or its first one"
    )

    sends = "outputs on public samples"
    needs_public_set = trains_on_public_set = evaluated_with_server = True

    def validate(self) -> None:
        for name, bits in (("bits_up", self.bits_up), ("bits_down", self.bits_down)):
            if bits > MOST and bits != FULL:
                raise ConfigError(f"{bits} bits: must be 1 to {MOST}, or {FULL}", name)

    def networks(self) -> Mapping[str, Any]:
        return {STUDENT: self.student}

    def messages(self) -> Messages:
        rounds = Array((), Whole(NEVER))
        return Messages(
            up={"labels": self.up.array()},
            down={"labels": Maybe(self.down.array()), "round": rounds, "since": rounds},
            evaluation={"model": Model(STUDENT)} if self.student_steps else {},
        )

    @property
    def up(self) -> LabelCode:
        return LabelCode(self.bits_up)

    @property
    def down(self) -> LabelCode:
        return LabelCode(self.bits_down)

    # The server.

    def start(self, server: Server) -> Tree:
        student = server.initial(STUDENT, 0)
        classes = public_logits(server, STUDENT, student).shape[1]
        return {"student": student, "classes": torch.tensor(classes)}

    def broadcast(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        since = int(state.get("answered", {}).get(str(client.id), NEVER))
        if "labels" not in state:
            return Message(round=server.round, since=since)
        new = state["changed"] > since
        labels = self.down.encode(state["labels"], new, int(state["classes"]))
        return Message(labels=labels, round=server.round, since=since)

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        classes = int(state["classes"])
        heard, answered = dict(state.get("heard", {})), dict(state.get("answered", {}))
        for reply in replies:
            name, data = str(reply.client.id), reply.message["labels"]
            unknown = self.up.unknown(len(server.public_x), classes, data)
            heard[name] = self.up.decode(data, heard.get(name, unknown).to(data.device), classes)
            answered[name] = torch.tensor(server.round)
        said = [self.up.probabilities(heard[str(reply.client.id)], classes) for reply in replies]
        student, taught = self.teach(server, state["student"], torch.stack(said).mean(0))
        labels = self.down.symbols(taught)
        sent = server.round + 1  # those who answered in this round have got the earlier labels
        return {
            "student": student,
            "classes": state["classes"],
            "heard": heard,
            "answered": answered,
            "labels": labels,
            "changed": last_changes(labels, state, "labels", "changed", sent),
        }

    def teach(self, server: Server, student: Weights, mean: Tensor) -> tuple[Weights, Tensor]:
        """The student of the clients' mean labels, and what the clients are to imitate."""
        if not self.student_steps:
            return student, mean
        teacher = mean.to(server.public_x.device)
        student = distilled(
            server,
            STUDENT,
            student,
            teacher,
            self.student_steps,
            self.rate,
            self.batch_size,
            decays=False,
        )
        return student, public_logits(server, STUDENT, student).softmax(1)

    # One client.

    def client_round(self, client: Client, message: Message) -> Message:
        classes, state = client.logits().shape[1], dict(client.state)
        if self.begin == "initial":
            state.setdefault("first", client.weights)
        lesson = []
        if "labels" in message:
            data = message["labels"]
            if "taught" not in state:
                samples = len(client.logits())
                state["taught"] = self.down.unknown(samples, classes, data)
            state["taught"] = self.down.decode(data, state["taught"], classes)
            lesson = [self.down.probabilities(state["taught"], classes)]
        weights = state.get("first", client.weights)
        client.weights = learn(client, weights, imitate, lesson, self.distil_steps)
        said = self.up.symbols(client.soft_decisions())
        changed = last_changes(said, state, "said", "changed", int(message["round"]))
        client.state = state | {"said": said, "changed": changed}
        return Message(labels=self.up.encode(said, changed > message["since"], classes))

    # The student is the global model.

    def evaluation_message(self, server: Server, state: Tree, client: ClientInfo) -> Message:
        return Message(model=state["student"]) if self.student_steps else Message()

    def models(self, client: Client, message: Message) -> dict[str, Predictor]:
        personal: dict[str, Predictor] = {"personal": client.weights}
        if not self.student_steps:
            return personal
        return personal | {"global": OfNetwork(message["model"], STUDENT)}


def last_changes(symbols: Tensor, state: Tree, name: str, rounds: str, round: int) -> Tensor:
    """The round in which each row last became what it is; before, ``state`` has the symbols by
    ``name`` and their rounds by ``rounds``."""
    now = torch.full((len(symbols),), round, dtype=torch.int32, device=symbols.device)
    if name not in state:
        return now
    before, earlier = state[name].to(symbols.device), state[rounds].to(symbols.device)
    return torch.where((symbols != before).any(1), now, earlier)
