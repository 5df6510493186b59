"""PFLlib: its servers and clients, its loop over a round, its reader of files.

Evaluation and saving are left out of the round, as for everybody.
"""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
from stand_ins import stand_in_for
from torch_peer import TorchPeer, arrays, device_memory, seeded_network, synchronize
from work import Models, Work

__all__ = ["PACKAGES", "STOOD_IN", "Peer", "device_memory"]
PACKAGES = ["torch", "numpy", "scikit-learn", "h5py"]
STOOD_IN = ["the network is the comparison's", "evaluation and saving are switched off"]
SERVERS = {"fedavg": ("serveravg", "FedAvg"), "ditto": ("serverditto", "Ditto")}


class Peer(TorchPeer):
    def __init__(self, work: Work, variant: str, source: str) -> None:
        sys.path.insert(0, str(Path(source) / "system"))
        super().__init__(work, variant)
        stand_in_for("h5py", "sklearn", "matplotlib")
        write_files(work, Path.cwd())
        np.random.seed(0)
        module, name = SERVERS[work.algorithm]
        server = getattr(importlib.import_module(f"flcore.servers.{module}"), name)
        said = arguments(work)
        said.model = seeded_network(work)
        self.server = server(said, 0)
        for left_out in ("evaluate", "evaluate_personalized", "save_results", "save_global_model"):
            setattr(self.server, left_out, lambda: None)
        self.server.rs_test_acc = [0.0]  # its loop ends with the best of them
        self.server.Budget = [0.0, 0.0]  # and with the mean time of earlier rounds

    def round(self) -> None:
        self.server.train()
        synchronize(self.work)

    def models(self) -> Models:
        found = {"global": [arrays(self.server.global_model)]}
        if self.work.algorithm == "ditto":
            found["personal"] = [arrays(client.model_per) for client in self.server.clients]
        return found


def write_files(work: Work, folder: Path) -> None:
    """The arrays where PFLlib looks for them: in ``../dataset`` of the folder it runs in."""
    for part, samples in (("train", work.train), ("test", work.test)):
        where = folder / "dataset" / "shared" / part
        where.mkdir(parents=True)
        for client, (x, y) in enumerate(samples):
            np.savez(where / f"{client}.npz", data=np.array({"x": x, "y": y}, dtype=object))
    (folder / "system").mkdir()
    os.chdir(folder / "system")


def arguments(work: Work) -> Namespace:
    """Its command line, with its defaults for what the work does not say."""
    return Namespace(
        algorithm=work.algorithm,
        device=work.device,
        dataset="shared",
        num_classes=work.classes,
        global_rounds=0,  # its loop makes one round more
        local_epochs=1,
        plocal_epochs=1,
        batch_size=work.batch_size,
        local_learning_rate=work.learning_rate,
        learning_rate_decay=False,
        learning_rate_decay_gamma=0.99,
        mu=work.weight,
        num_clients=work.clients,
        join_ratio=work.clients_per_round / work.clients,
        random_join_ratio=False,
        few_shot=0,
        time_select=False,
        goal="test",
        time_threthold=10000,
        save_folder_name="items",
        top_cnt=100,
        auto_break=False,
        eval_gap=1,
        client_drop_rate=0.0,
        train_slow_rate=0.0,
        send_slow_rate=0.0,
        dlg_eval=False,
        dlg_gap=100,
        batch_num_per_client=2,
        num_new_clients=0,
        fine_tuning_epoch_new=0,
    )
