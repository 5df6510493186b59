"""perfed itself. The variant is an engine, a precision, or both: ``stacked-bf16``. With the word
``mapped`` clients' samples stay on disk until their clients are selected; which of its samples a
client trains with is then drawn anew."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch_peer import device_memory, synchronize
from work import Arrays, Models, Work

from perfed.config import Experiment
from perfed.core.channel import Channel
from perfed.core.schema import from_mapping
from perfed.core.threads import cpu_threads
from perfed.engines import Execution
from perfed.engines.execution import fitting_threads
from perfed.runs.simulation import Simulation

__all__ = ["PACKAGES", "STOOD_IN", "Peer", "device_memory"]
PACKAGES = ["torch", "numpy", "ray"]
STOOD_IN: list[str] = []
ENGINES = ("sequential", "stacked", "ray")


class Peer:
    def __init__(self, work: Work, variant: str, source: str) -> None:
        said = variant.split("-") if variant else []
        engine = next((word for word in said if word in ENGINES), "auto")
        mapped = "mapped" in said
        precision = next((word for word in said if word not in (*ENGINES, "mapped")), "auto")
        torch.set_num_threads(work.threads)
        how = {"engine": engine, "precision": precision, "device": work.device}
        self.work = work
        assert work.experiment is not None
        on_disk = {"name": "mapped", "path": str(work.folder / "mapped")}
        experiment = work.experiment | ({"data": on_disk, "partition": "given"} if mapped else {})
        self.simulation = Simulation(
            from_mapping(Experiment, experiment), how=from_mapping(Execution, how)
        )
        self._open = ExitStack()
        self._open.enter_context(cpu_threads(fitting_threads(self.simulation.population)))
        self.channel, self.rounds = Channel(), 0
        self.simulation.begin(self.channel)

    def round(self) -> None:
        self.simulation.play_round(self.rounds, self.channel)
        self.rounds += 1
        synchronize(self.work)

    def counted_round(self) -> int:
        self.round()
        models = 2 if self.work.algorithm == "ditto" else 1
        steps = self.simulation.experiment.training.steps
        return models * self.work.clients_per_round * steps

    def models(self) -> Models:
        simulation, last = self.simulation, self.rounds - 1
        messages = simulation.evaluation_messages(last)
        (made,) = simulation.engine.perform([simulation.population.call("models", messages, last)])
        found: Models = {}
        for _, by_kind in sorted(made.items()):
            for kind, model in by_kind.items():
                found.setdefault(kind, []).append(_arrays(model))
        return found

    def close(self) -> None:
        self._open.close()
        self.simulation.engine.close()


def _arrays(model: Any) -> Arrays:
    return {n: t.detach().float().cpu().numpy() for n, t in (model.params | model.buffers).items()}
