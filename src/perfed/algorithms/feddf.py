"""FedDF (Lin et al. 2020): FedAvg, then the server distils the clients' ensemble.

The variant: one student per architecture, starting from that architecture's average; the teacher is
the softmax of the mean logits of *all* models that came in, of whatever architecture, in evaluation
mode, on the unlabeled public set; KL divergence, Adam with cosine decay, as in the authors' code.
They stop early on labelled validation data at the server. Here the server has none, so the number
of steps is fixed, and smaller than their upper limit of 10,000. The student distils in training
mode, so public images move its BatchNorm statistics, as in their code. An ensemble of one has
nothing to teach: Adam would make steps of what is only rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import kl_div, log_softmax

from perfed.algorithms.fedavg import FedAvg, average_by_architecture
from perfed.core.algorithm import Reply, Server, algorithms, trainable
from perfed.core.schema import option
from perfed.core.streams import stream_key, uniform_indices
from perfed.core.tree import Tree, Weights

TEACHING_BATCH = 1024


@algorithms.register("feddf")
@dataclass(frozen=True)
class FedDF(FedAvg):
    steps: int = option(100, "distillation steps a round", ge=0)
    rate: float = option(1e-3, "Adam's learning rate, decaying to zero by a cosine", gt=0)
    batch_size: int = option(128, "public samples a distillation step", ge=1)

    needs_public_set = True

    def merge(self, server: Server, state: Tree, replies: Sequence[Reply]) -> Tree:
        students = average_by_architecture(replies)
        if self.steps and len(replies) > 1:
            teacher = torch.stack(
                [public_logits(server, r.client.architecture, r.message["model"]) for r in replies]
            ).mean(0)
            students = {
                architecture: self.distil(server, architecture, student, teacher.softmax(1))
                for architecture, student in students.items()
            }
        return state | students

    def distil(
        self, server: Server, architecture: str, student: Weights, teacher: Tensor
    ) -> Weights:
        return distilled(
            server, architecture, student, teacher, self.steps, self.rate, self.batch_size
        )


def distilled(
    server: Server,
    network: str,
    student: Weights,
    teacher: Tensor,
    steps: int,
    rate: float,
    batch_size: int,
    decays: bool = True,
) -> Weights:
    """The student after some steps of Adam on KL(teacher ‖ student) on public samples; the rate
    decays to zero by a cosine, or stays."""
    module = server.modules[network].train()
    student = student.clone()
    optimizer = torch.optim.Adam(trainable(module, student).values(), lr=rate)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if decays else None
    key = stream_key(server.seed, f"server/distillation/{network}", round=server.round)
    public = server.public_x
    batches = uniform_indices(key, (steps, batch_size), len(public), public.device)
    for batch in batches:
        logits = functional_call(module, student.params | student.buffers, (public[batch],))
        loss = kl_div(log_softmax(logits, 1), teacher[batch], reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if cosine:
            cosine.step()
    return student.clone()


@torch.no_grad()
def public_logits(server: Server, network: str, weights: Weights) -> Tensor:
    """One model's logits on the public set, in evaluation mode."""
    module = server.modules[network].eval()
    batches = torch.split(server.public_x, TEACHING_BATCH)
    return torch.cat(
        [functional_call(module, weights.params | weights.buffers, (x,)) for x in batches]
    )
