"""FedRep (Collins et al., ICML 2021): FedPer that trains the head first and then the base.

A client gets the averaged base, trains its own head with this base fixed, and then the base with
the new head fixed. What crosses, who keeps what and what is evaluated are FedPer's. A fixed part
does not move at all, whatever the optimizer does: it goes into the objective as a constant.

* The two trainings share the client's τ steps, as in the authors' code, where they share the local
  epochs. So a round costs no more steps than FedAvg's. A third of them for the base is what all but
  one of their scripts do: 5 epochs of 15. Each part gets at least one step.
* The two trainings draw different mini-batches.
* BatchNorm's running statistics move in both, as in the authors' code. They are the base's.
* Momentum and weight decay are the experiment's. Theirs were 0.5 and 0.0001.
* After the last round all of their clients train their heads once more. Here no round is special.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from perfed.algorithms.fedper import FedPer
from perfed.core.algorithm import Client, Network, Private, algorithms, supervised
from perfed.core.schema import option
from perfed.core.tree import Weights


@algorithms.register("fedrep")
@dataclass(frozen=True)
class FedRep(FedPer):
    base_share: float = option(
        0.33,
        "share of a client's steps that train the base; those before train the head",
        gt=0,
        lt=1,
    )

    def trained(self, client: Client, start: Weights) -> Weights:
        base_steps = max(1, round(self.base_share * client.steps))
        head_steps = max(1, client.steps - base_steps)
        base = client.base_of(start).params
        moved = client.sgd(start, with_fixed, base, steps=head_steps)
        head = {name: param for name, param in moved.params.items() if name not in base}
        ready = moved._replace(params=moved.params | base)
        moved = client.sgd(ready, with_fixed, head, steps=base_steps)
        return moved._replace(params=moved.params | head)


def with_fixed(model: Network, private: Private, public: None, fixed: dict[str, Tensor]) -> Tensor:
    """The plain objective at the parameters in ``fixed``: only the others have an effect."""
    loss = supervised(model.at(model.params | fixed, moves_statistics=True), private, public)
    # There is a gradient, of zero, even where all others are frozen.
    nothing = sum(param.sum() for param in model.trained.values())
    return loss + 0.0 * nothing
