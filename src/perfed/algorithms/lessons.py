"""What clients do with outputs on public samples, in most methods that send them: a lesson first,
then their own samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.core.algorithm import Client, Network, Objective, Parts, Private, Public
from perfed.core.tree import Weights


def first_hand(model: Network, private: Private, public: Public) -> Tensor:
    """Local training. BatchNorm must have seen public samples too, to say something of them."""
    model.observe(public.x)
    return cross_entropy(model(private.x), private.y)


def imitate(model: Network, private: Private | None, public: Public, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ student) on public samples, up to the teacher's entropy, which no student can
    change."""
    return cross_entropy(model.public(public.x), teacher[public.index])


def learn(
    client: Client,
    weights: Weights,
    objective: Objective,
    lesson: Sequence[Tensor],
    steps: int | None,
) -> Weights:
    """So many steps on a lesson of public samples, if there is one, then τ on own samples.

    The own mini-batches are those of local training. Both trainings happen in every round, though
    one may have no steps, so that an optimizer's kept state goes on with the same one.
    """
    from_public = Parts(None, objective)
    taught = client.sgd(weights, from_public, *lesson, steps=steps if lesson else 0, stream=1)
    return client.sgd(taught, first_hand, stream=0)
