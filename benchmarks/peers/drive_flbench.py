"""FL-bench: its servers, clients and trainer. The variant ``parallel`` is its Ray mode."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from stand_ins import stand_in_for
from torch_peer import (
    TorchPeer,
    arrays,
    device_memory,
    import_torchvision,
    seeded_network,
    synchronize,
)
from work import Arrays, Models, Work

__all__ = ["PACKAGES", "STOOD_IN", "Peer", "device_memory"]
PACKAGES = ["torch", "torchvision", "numpy", "ray", "hydra-core"]
STOOD_IN = [
    "the network is the comparison's, cut before its last layer",
    "the dataset is the shared arrays, not divided by 255",
    "hydra's record of the output folder",
    "evaluation is switched off",
]
SERVERS = {"fedavg": ("fedavg", "FedAvgServer"), "ditto": ("ditto", "DittoServer")}


class Peer(TorchPeer):
    def __init__(self, work: Work, variant: str, source: str) -> None:
        sys.path.insert(0, source)
        super().__init__(work, variant)
        self.parallel = "parallel" in variant
        stand_in_for(*([] if self.parallel else ["ray"]), "hydra", "sklearn", "pandas")
        import_torchvision()
        base = importlib.import_module("src.server.fedavg")
        module, name = SERVERS[work.algorithm]
        server = getattr(importlib.import_module(f"src.server.{module}"), name)
        write_partition(work, Path.cwd())
        base.FLBENCH_ROOT = Path.cwd()
        place = SimpleNamespace(runtime=SimpleNamespace(output_dir=str(Path.cwd() / "out")))
        base.HydraConfig = SimpleNamespace(get=lambda: place)
        base.DATASETS["shared"] = lambda root, args, **transforms: dataset(base, work, transforms)
        base.MODELS["shared"] = lambda dataset, pretrained: decoupled(base, work)
        if self.parallel:
            import ray

            os.environ["OMP_NUM_THREADS"] = "1"  # as Ray sets it for a worker with one core
            hook = {"worker_process_setup_hook": import_torchvision}
            ray.init(num_cpus=work.threads, include_dashboard=False, runtime_env=hook)
        self.server = server(args=arguments(work, self.parallel, Path(source)))
        self.rounds = 0

    def round(self) -> None:
        server = self.server
        server.current_epoch = self.rounds
        server.selected_clients = server.client_sample_stream[self.rounds]
        server.train_one_round()
        self.rounds += 1
        synchronize(self.work)

    def counted_round(self) -> int:
        if self.parallel:  # they are taken in other processes
            self.round()
            models = 2 if self.work.algorithm == "ditto" else 1
            return models * self.work.clients_per_round * self.work.steps
        return super().counted_round()

    def models(self) -> Models:
        found = {"global": [self._named(arrays(self.server.model))]}
        if self.work.algorithm == "ditto":
            own = self.server.clients_personalized_model_params
            found["personal"] = [
                self._named({n: t.numpy() for n, t in own[client].items()})
                for client in range(self.work.clients)
            ]
        return found

    def _named(self, found: Arrays) -> Arrays:
        return dict(zip(self.work.initial(), found.values(), strict=True))


def write_partition(work: Work, folder: Path) -> None:
    """Whose is which of the training samples, where FL-bench looks for it."""
    where = folder / "data" / "shared"
    where.mkdir(parents=True)
    ends = np.cumsum([len(y) for _, y in work.train])
    everyone = list(range(work.clients))
    indices = [
        {"train": np.arange(end - len(y), end), "val": [], "test": []}
        for end, (_, y) in zip(ends, work.train, strict=True)
    ]
    separation = {"train": everyone, "test": everyone, "val": everyone, "total": work.clients}
    with (where / "partition.pkl").open("wb") as file:
        pickle.dump({"separation": separation, "data_indices": indices}, file)
    (where / "args.json").write_text(json.dumps({"split": "sample"}))


def dataset(base: Any, work: Work, transforms: dict[str, Any]) -> Any:
    class Shared(base.BaseDataset):
        def _rescale_data(self) -> None:
            pass  # values above one are no bytes here

    x, y = (np.concatenate(parts) for parts in zip(*work.train, strict=True))
    classes = list(range(work.classes))
    return Shared(torch.from_numpy(x), torch.from_numpy(y).long(), classes, **transforms)


def decoupled(base: Any, work: Work) -> Any:
    network = seeded_network(work).cpu()  # the server keeps it there
    model = base.DecoupledModel()
    *base_layers, last = network
    model.base, model.classifier = torch.nn.Sequential(*base_layers), last
    return model


def arguments(work: Work, parallel: bool, source: Path) -> Any:
    """Its default configuration with what the work says."""
    from omegaconf import OmegaConf

    never = {"interval": -1, "train": False, "val": False, "test": False}
    return OmegaConf.merge(
        OmegaConf.load(source / "config" / "defaults.yaml"),
        {
            "dataset": {"name": "shared"},
            "model": {"name": "shared"},
            "optimizer": {"lr": work.learning_rate},
            "mode": "parallel" if parallel else "serial",
            "parallel": {"num_cpus": work.threads, "num_gpus": 0, "num_workers": work.threads},
            "common": {
                "seed": 0,
                "join_ratio": work.clients_per_round / work.clients,
                "global_epoch": 1000,
                "local_epoch": 1,
                "batch_size": work.batch_size,
                "client_side_evaluation": False,
                "test": {"client": never, "server": never},
                "use_cuda": work.device != "cpu",
                "save_log": False,
                "save_learning_curve_plot": False,
                "save_metrics": False,
            },
            "ditto": {"pers_epoch": 1, "lamda": work.weight},
        },
    )
