"""BlazeFL: its FedAvg. The variant ``threads`` trains as many clients at once as there are."""

from __future__ import annotations

import sys
from typing import Any

import torch
from stand_ins import defer_annotations
from torch.utils.data import DataLoader, TensorDataset
from torch_peer import TorchPeer, arrays, device_memory, seeded_network, synchronize
from work import Models, Work

__all__ = ["PACKAGES", "STOOD_IN", "Peer", "device_memory"]
PACKAGES = ["blazefl", "torch", "numpy"]
STOOD_IN = ["the network and the dataset are the comparison's"]


class Networks:
    def __init__(self, work: Work) -> None:
        self.work = work

    def select_model(self, model_name: str) -> torch.nn.Module:
        return seeded_network(self.work)


class Data:
    def __init__(self, work: Work) -> None:
        self.parts = [
            TensorDataset(torch.from_numpy(x), torch.from_numpy(y).long()) for x, y in work.train
        ]

    def get_dataset(self, type_: str, cid: int | None) -> Any:
        return self.parts[cid]

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: Any) -> Any:
        return DataLoader(self.parts[cid], batch_size, shuffle=True, generator=generator)


class Peer(TorchPeer):
    def __init__(self, work: Work, variant: str, source: str) -> None:
        if work.algorithm != "fedavg":
            raise NotImplementedError(f"BlazeFL has no {work.algorithm}")
        if sys.version_info < (3, 14):
            defer_annotations("blazefl")
        from blazefl.contrib import fedavg

        super().__init__(work, variant)
        at_once = variant == "threads"
        if at_once:
            torch.set_num_threads(1)
        common = {
            "model_selector": Networks(work),
            "model_name": "shared",
            "dataset": Data(work),
            "num_clients": work.clients,
            "device": work.device,
            "batch_size": work.batch_size,
            "seed": 0,
        }
        ratio = work.clients_per_round / work.clients
        self.server = fedavg.FedAvgBaseServerHandler(
            global_round=1000, sample_ratio=ratio, **common
        )
        common |= {"epochs": 1, "lr": work.learning_rate}
        self.trainer: Any = (
            fedavg.FedAvgThreadPoolClientTrainer(num_parallels=work.threads, **common)
            if at_once
            else fedavg.FedAvgBaseClientTrainer(**common)
        )

    def round(self) -> None:
        selected = self.server.sample_clients()
        self.trainer.local_process(self.server.downlink_package(), selected)
        for package in self.trainer.uplink_package():
            self.server.load(package)
        synchronize(self.work)

    def models(self) -> Models:
        return {"global": [arrays(self.server.model)]}
