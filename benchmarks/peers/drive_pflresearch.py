"""pfl-research: its FederatedAveraging on its simulated backend, one central iteration a round."""

from __future__ import annotations

import types
from typing import Any

import torch
from stand_ins import stand_in_for
from torch_peer import TorchPeer, arrays, device_memory, seeded_network, synchronize
from work import Models, Work

__all__ = ["PACKAGES", "STOOD_IN", "Peer", "device_memory"]
PACKAGES = ["torch", "numpy", "dp-accounting"]
STOOD_IN = ["the network and its loss are the comparison's"]


class Peer(TorchPeer):
    def __init__(self, work: Work, variant: str, source: str) -> None:
        if work.algorithm != "fedavg":
            raise NotImplementedError(f"pfl-research has no {work.algorithm}")
        super().__init__(work, variant)
        stand_in_for("dp_accounting", "prv_accountant")
        from pfl.aggregate.simulate import SimulatedBackend
        from pfl.aggregate.weighting import WeightByDatapoints
        from pfl.algorithm.federated_averaging import FederatedAveraging
        from pfl.data import FederatedDataset
        from pfl.data.sampling import get_user_sampler
        from pfl.hyperparam import NNTrainHyperParams
        from pfl.model.pytorch import PyTorchModel

        self.rounds = 0
        self.network = seeded_network(work)
        self.network.loss = types.MethodType(_loss, self.network)
        self.network.metrics = types.MethodType(_no_metrics, self.network)
        self.model = PyTorchModel(
            model=self.network,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(self.network.parameters(), 1.0),
        )
        users = [
            (torch.from_numpy(x).to(work.device), torch.from_numpy(y).long().to(work.device))
            for x, y in work.train
        ]
        sampler = get_user_sampler("random", range(work.clients))
        data = FederatedDataset.from_slices(users, sampler)
        self.backend = SimulatedBackend(
            training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]
        )
        self.algorithm = FederatedAveraging()
        self.training = NNTrainHyperParams(
            local_learning_rate=work.learning_rate,
            local_num_epochs=1,
            local_batch_size=work.batch_size,
        )

    def round(self) -> None:
        from pfl.algorithm.base import NNAlgorithmParams

        self.rounds += 1
        asked = NNAlgorithmParams(
            central_num_iterations=self.rounds,
            evaluation_frequency=1_000_000,
            train_cohort_size=self.work.clients_per_round,
            val_cohort_size=0,
        )
        self.algorithm.run(asked, self.backend, self.model, self.training)
        synchronize(self.work)

    def counted_round(self) -> int:
        return super().counted_round() - 1  # one is the server's

    def models(self) -> Models:
        return {"global": [arrays(self.network)]}


def _loss(self: Any, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
    self.train(not eval)
    return torch.nn.functional.cross_entropy(self(x), y)


def _no_metrics(self: Any, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Any]:
    return {}
