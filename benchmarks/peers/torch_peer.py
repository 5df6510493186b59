"""What the adapters of peers that run torch have in common."""

from __future__ import annotations

import networks
import torch
from torch.optim import optimizer
from work import Arrays, Work


def seeded_network(work: Work, number: int = 0) -> torch.nn.Module:
    """The network with the weights from which everybody starts."""
    shape = work.train[0][0].shape[1:]
    network = getattr(networks, work.network)(shape, work.classes)
    return started(network, work.initial(number)).to(work.device)


def started(network: torch.nn.Module, initial: Arrays) -> torch.nn.Module:
    network.load_state_dict({name: torch.from_numpy(array) for name, array in initial.items()})
    return network


def arrays(network: torch.nn.Module) -> Arrays:
    return {name: tensor.detach().cpu().numpy() for name, tensor in network.state_dict().items()}


def synchronize(work: Work) -> None:
    if work.device != "cpu":
        torch.cuda.synchronize()


class StepCount:
    """How many steps optimizers have taken, as long as it is open."""

    def __enter__(self) -> StepCount:
        self.steps = 0
        self._hook = optimizer.register_optimizer_step_post_hook(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        self._hook.remove()

    def _count(self, *ignored: object) -> None:
        self.steps += 1


def device_memory(work: Work) -> int | None:
    return None if work.device == "cpu" else torch.cuda.max_memory_allocated()


def torchvision_without_operators() -> None:
    """Where torchvision's compiled part does not fit torch, its Python part is imported alone."""
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    kept.append(operators)
    import torchvision  # noqa: F401


kept: list[object] = []  # what torch forgets with its object
