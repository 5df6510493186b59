"""HtFLlib: its Local server and clients, its loop, its reader of files.

The networks are perfed's of the same names, which are made for 32×32 pictures.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from drive_pfllib import arguments, write_files
from stand_ins import stand_in_for
from torch_peer import (
    TorchPeer,
    arrays,
    device_memory,
    import_torchvision,
    started,
    synchronize,
)
from work import Models, Work

from perfed.config import Experiment
from perfed.core.schema import from_mapping
from perfed.models import build_module

__all__ = ["PACKAGES", "STOOD_IN", "Peer", "device_memory"]
PACKAGES = ["torch", "torchvision", "numpy", "scikit-learn", "h5py"]
STOOD_IN = [
    "the networks are perfed's",
    "torch.load as it was before torch 2.6: HtFLlib keeps whole networks in files",
    "evaluation and saving of results are switched off",
]


class Peer(TorchPeer):
    def __init__(self, work: Work, variant: str, source: str) -> None:
        if work.algorithm != "local":
            raise NotImplementedError(f"HtFLlib has no {work.algorithm}")
        sys.path.insert(0, str(Path(source) / "system"))
        super().__init__(work, variant)
        stand_in_for("h5py", "sklearn")
        import_torchvision()
        torch.load = partial(torch.load, weights_only=False)
        write_files(work, Path.cwd())
        base = importlib.import_module("flcore.clients.clientbase")
        base.BaseHeadSplit = lambda args, client: client_network(work, client)
        said = arguments(work)
        said.models_folder_name = ""
        self.server = importlib.import_module("flcore.servers.serverlocal").Local(said, 0)
        self.server.evaluate = self.server.save_results = lambda: None
        self.server.rs_test_acc = [0.0]  # its loop ends with the best of them
        self.server.Budget = [0.0, 0.0]  # and with the mean time of earlier rounds

    def round(self) -> None:
        self.server.train()
        synchronize(self.work)

    def models(self) -> Models:
        folder = Path(self.server.save_folder_name)
        found = []
        for client in self.server.clients:
            found.append(arrays(torch.load(folder / f"{client.role}_model.pt")))
        return {"personal": found}


def client_network(work: Work, client: int) -> torch.nn.Module:
    experiment = from_mapping(Experiment, work.experiment)
    sizes = np.array([len(y) for _, y in work.train])
    dealt = experiment.models.deal(sizes, experiment.seed)
    shape = work.train[client][0].shape[1:]
    network = build_module(dealt[client], shape, work.classes)
    return started(network, work.initial(network=list(dict.fromkeys(dealt)).index(dealt[client])))
