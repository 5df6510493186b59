"""What the adapters of peers that run torch have in common."""

from __future__ import annotations

import importlib
import sys

import networks
import torch
from stand_ins import SAID
from torch.optim import optimizer
from work import Arrays, Work


class TorchPeer:
    """Trains in this process. The variant ``tf32`` lets a GPU round to TF32; else nothing does,
    although torch by itself lets convolutions."""

    def __init__(self, work: Work, variant: str) -> None:
        self.work = work
        use_torch(work, variant)

    def round(self) -> None:
        raise NotImplementedError

    def counted_round(self) -> int:
        """How many steps optimizers took in it."""
        steps = 0

        def count(*ignored: object) -> None:
            nonlocal steps
            steps += 1

        hook = optimizer.register_optimizer_step_post_hook(count)
        self.round()
        hook.remove()
        return steps

    def close(self) -> None:
        pass


def use_torch(work: Work, variant: str = "") -> None:
    torch.set_num_threads(work.threads)
    rounded = "tf32" in variant
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = rounded


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


def device_memory(work: Work) -> int | None:
    return None if work.device == "cpu" else torch.cuda.max_memory_allocated()


def import_torchvision() -> None:
    """Where its compiled part does not fit torch, its Python part alone."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # the first operator that is missing
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        operators = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        kept.append(operators)
        importlib.import_module("torchvision")
        SAID.append("torchvision's compiled operators, which are not used")


kept: list[object] = []  # what torch forgets with its object
