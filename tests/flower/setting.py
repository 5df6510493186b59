"""A small federation of three sites, and the simulation it must agree with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import perfed
from perfed import Experiment, Result
from perfed.config import dump_yaml
from perfed.core.schema import from_mapping
from perfed.flower import codec
from perfed.flower.protocol import Envelope
from perfed.flower.site import Site
from tests.conftest import SEQUENTIAL

DIGITS = Path(__file__).with_name("digits.npz")
DATA = {"name": "npz", "path": str(DIGITS), "public": 30}
PARTITION = {"name": "groups", "groups": 2}
SPLIT = {"train": [0.2, 0.4], "validation": 0.1, "test": 0.5}
MODELS = [
    {"name": "mlp", "hidden": [8]},
    {"name": "mlp", "hidden": [12]},
    {"name": "cnn", "batchnorm": True},
]
EXPERIMENT: dict[str, Any] = {
    "name": "trial",
    "rounds": 3,
    "clients": 3,
    "clients_per_round": 3,
    "training": {"steps": 2, "batch_size": 8, "public_batch_size": 8, "learning_rate": 0.1},
    "algorithm": {"name": "perfed-ckt", "clusters": 2},
}


def write_federation(
    folder: Path, models: list[Any] = MODELS, options: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """``coordinator.yaml`` and ``site-0.yaml`` … in a new folder."""
    folder.mkdir(parents=True)
    public = {"dataset": DATA}
    experiment = EXPERIMENT | {"models": distinct(models)} | changes
    coordinator = {"experiment": experiment, "classes": 10, "public": public, "poll": 0.01}
    (folder / "coordinator.yaml").write_text(dump_yaml(coordinator | (options or {})))
    for client, model in enumerate(models):
        site = {
            "client": client,
            "run": "trial",
            "state": f"state-{client}",
            "classes": 10,
            "model": model,
            "data": {"dataset": DATA, "partition": PARTITION, "clients": len(models)},
            "split": SPLIT,
            "public": public,
            "device": "cpu",
            "agrees": agreed(experiment),
        }
        write_site(folder, site)
    return folder


def agreed(experiment: dict[str, Any]) -> dict[str, Any]:
    """What a site must list to take part: the algorithm, and all that is not perfed's own."""

    def names(*values: Any) -> list[str]:
        return [value if isinstance(value, str) else value["name"] for value in values]

    training = experiment["training"]
    listed = {
        "algorithms": names(experiment["algorithm"]),
        "stages": names(*experiment.get("wire", ())),
        "metrics": list(experiment.get("metrics", ())),
        "optimizers": names(training.get("optimizer", "sgd")),
        "schedules": names(training.get("schedule", "constant")),
    }
    return {kind: found for kind, found in listed.items() if found}


def write_site(folder: Path, values: dict[str, Any], name: str | None = None) -> Path:
    path = folder / (name or f"site-{values['client']}.yaml")
    path.write_text(dump_yaml(values))
    return path


def distinct(models: list[Any]) -> list[Any]:
    return [model for n, model in enumerate(models) if model not in models[:n]]


def simulated(folder: Path, models: list[Any] = MODELS, **changes: Any) -> Result:
    """The same, all in one process, on the sequential engine."""
    kinds = distinct(models)
    assigned = {
        "architectures": kinds,
        "assign": "list",
        "per_client": [kinds.index(model) for model in models],
    }
    values = EXPERIMENT | changes
    values |= {"data": DATA, "partition": PARTITION, "split": SPLIT, "models": assigned}
    experiment = from_mapping(Experiment, copy.deepcopy(values))
    return perfed.run(experiment, folder, how=SEQUENTIAL)


def personal_checkpoint(folder: Path, client: int) -> Path:
    """A site's own model, as it stands on its disk."""
    (found,) = (folder / f"state-{client}").glob("*/personal.safetensors")
    return found


class Desk:
    """Carries envelopes within this process, each through its encoding, and loses some.

    ``fate`` decides about every task: an answer is made by the site and delivered, or ``"dead"``
    (the site never sees it), ``"lost"`` (it does the work, the answer vanishes), or another word:
    the error that Flower would report.
    """

    def __init__(
        self, sites: dict[int, Path], fate: Callable[[int, Envelope], str | None] | None = None
    ) -> None:
        self.sites = sites
        self.fate = fate or (lambda node, task: None)
        self.tasks: list[tuple[int, Envelope]] = []
        self.keys: dict[int, str] = {}
        self.said: list[str] = []
        self._arrived: dict[str, Envelope | str] = {}

    def nodes(self) -> list[int]:
        return list(self.sites)

    def key(self, node: int) -> str:
        return self.keys.get(node, "")

    def send(self, node: int, task: Envelope, seconds: float) -> str:
        name = f"message-{len(self.tasks)}"
        self.tasks.append((node, task))
        fate = self.fate(node, task)
        if fate == "dead":
            return name
        if fate not in (None, "lost"):
            self._arrived[name] = fate
            return name
        site = Site.open(self.sites[node], self.said.append)
        answer = site.answer(codec.decode(codec.encode(task)))
        if fate != "lost":
            self._arrived[name] = codec.decode(codec.encode(answer))
        return name

    def receive(self, names: Iterable[str]) -> dict[str, Envelope | str]:
        return {name: self._arrived.pop(name) for name in list(names) if name in self._arrived}


def desk(folder: Path, fate: Callable[[int, Envelope], str | None] | None = None) -> Desk:
    """Node 10 is client 0, and so on."""
    sites = sorted(folder.glob("site-*.yaml"))
    return Desk({10 + n: path for n, path in enumerate(sites)}, fate)
