"""How an experiment is executed: what may change the time a run takes, and not its meaning."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from perfed.core.errors import ConfigError
from perfed.core.notices import say_once
from perfed.core.schema import Options, option
from perfed.engines.base import Engine
from perfed.engines.population import Population
from perfed.engines.precision import PRECISIONS, check_bf16
from perfed.engines.sequential import SequentialEngine

if TYPE_CHECKING:
    from perfed.engines.stacked import StackedEngine


@dataclass(frozen=True)
class Execution(Options):
    """Where and how clients execute."""

    engine: Literal["auto", "sequential", "stacked", "ray"] = option(
        "auto",
        "sequential: one client after another; stacked: all clients of one architecture at once; "
        "ray: like stacked, spread over several processes or machines; auto: the faster of the "
        "first two",
    )
    workers: int = option(
        0, "number of Ray workers; 0: one per GPU, or one per core where there is no GPU", ge=0
    )
    device: str = option("auto", "cpu, cuda, cuda:1, …; auto: a CUDA GPU if there is one")
    precision: Literal["auto", "float32", "tf32", "bf16"] = option(
        "auto", "number format of the networks; auto: float32, or the one a resumed run began with"
    )
    store_limit: float | None = option(
        None,
        "MiB of client models kept in memory, the rest is kept on disk; none: all in memory",
        ge=0,
    )
    checkpoint_seconds: float = option(10.0, "seconds between two checkpoints, at least", ge=0)
    save_models: bool = option(True, "save every client's final model in the run directory")

    def validate(self) -> None:
        if self.workers and self.engine != "ray":
            raise ConfigError("only the engine ray has workers", "workers")
        if self.engine == "ray" and self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(
                f"Ray says which GPU a worker has: must be cpu or cuda, not {self.device}", "device"
            )

    def torch_device(self) -> torch.device:
        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(name)
            # Means, metrics and noise are in double precision, which not every GPU has (a Mac's).
            float(torch.zeros(1, dtype=torch.float64, device=device))
        except (RuntimeError, AssertionError, ImportError, TypeError) as error:
            reason = str(error).splitlines()[0]
            if reason.startswith("Expected one of"):  # PyTorch then names all devices it ever had
                reason = "must be auto, cpu, cuda, or cuda:1 for the second GPU"
            raise ConfigError(f"device '{name}' cannot be used: {reason}") from None
        return device

    def store_bytes(self) -> int | None:
        return None if self.store_limit is None else int(self.store_limit * 2**20)

    def build_engine(self) -> Engine:
        """The engine asked for. By itself it is ``stacked``, by rule and not by trial: what is
        timed here would be chosen by chance, and two engines differ in last bits."""
        precision = PRECISIONS["float32" if self.precision == "auto" else self.precision]
        if self.engine == "ray":
            from perfed.engines.ray import RayEngine

            return RayEngine(precision, self.device, self.workers)
        device, name = self.torch_device(), self.engine
        if precision.name == "tf32" and device.type != "cuda":
            raise ConfigError("tf32 is a GPU's; a CPU has float32 and bf16", "--precision")
        if precision.name == "bf16" and device.type == "cpu":
            check_bf16()
        plain = device.type not in ("cpu", "cuda")  # Intel's GPU, for example
        if plain and name == "stacked":
            raise ConfigError(
                f"the engine stacked runs on cpu and cuda; {device.type} has sequential", "--engine"
            )
        stacked = None if plain or name == "sequential" else stacked_engine()
        if stacked is None:
            return SequentialEngine(precision)
        cuda = device.type == "cuda"
        return stacked(precision, record=cuda, threads=1 if cuda else torch.get_num_threads())

    def several_runs(self) -> AbstractContextManager[Any]:
        """Around runs one after another: the workers of the first serve the others too."""
        if self.engine != "ray":
            return nullcontext()
        from perfed.engines.ray import session

        return session()


def stacked_engine() -> type[StackedEngine] | None:
    """The class, imported when it is needed; None where torch lacks the private parts it uses."""
    try:
        from perfed.engines.stacked import StackedEngine
    except ImportError as error:
        say_once(
            f"engine stacked does not work with torch {torch.__version__} ({error}): "
            "clients train one after another, engine sequential"
        )
        return None
    return StackedEngine


def fitting_threads(population: Population) -> int:
    """Threads for one operation: small tensors are faster on one. Other engines than sequential
    give their threads to clients."""
    sequential = population.engine.name == "sequential"
    large = sequential and population.is_large(population.by_label)
    return torch.get_num_threads() if large else 1
