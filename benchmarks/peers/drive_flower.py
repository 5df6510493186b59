"""Flower's simulation on Ray: its FedAvg strategy, and a ClientApp such as its tutorials have.

As many clients at once as there are threads, each with one.
"""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.utils.data import DataLoader, TensorDataset
from torch_peer import device_memory, seeded_network
from work import Models, Work

__all__ = ["PACKAGES", "STOOD_IN", "Peer", "device_memory"]
PACKAGES = ["flwr", "ray", "torch", "numpy"]
STOOD_IN = ["the network, the dataset and the ClientApp are the comparison's"]


class Peer:
    def __init__(self, work: Work, variant: str, source: str) -> None:
        if work.algorithm != "fedavg":
            raise NotImplementedError(f"Flower has no {work.algorithm} of its own")
        self.work = work
        self.orders: Queue[bool] = Queue()
        self.done: Queue[Any] = Queue()
        initial = {n: torch.from_numpy(a) for n, a in work.initial().items()}
        self.arrays = ArrayRecord(initial)
        self.steps = 0
        threading.Thread(target=self._simulate, daemon=True).start()

    def _simulate(self) -> None:
        gpus = 0.0 if self.work.device == "cpu" else 1.0 / self.work.threads
        os.environ["OMP_NUM_THREADS"] = "1"  # as Ray sets it for a worker with one core
        try:
            run_simulation(
                server_app(self),
                client_app(self.work.folder),
                num_supernodes=self.work.clients,
                backend_config={
                    "init_args": {"num_cpus": self.work.threads, "include_dashboard": False},
                    "client_resources": {"num_cpus": 1, "num_gpus": gpus},
                },
            )
        except BaseException as error:  # the round that waits has to know
            self.done.put(error)

    def round(self) -> None:
        self.orders.put(True)
        result = self.done.get()
        if isinstance(result, BaseException):
            raise result
        self.arrays = result.arrays
        (metrics,) = result.train_metrics_clientapp.values()
        self.steps = round(metrics["steps"] * self.work.clients_per_round)

    def counted_round(self) -> int:
        self.round()
        return self.steps

    def models(self) -> Models:
        state = self.arrays.to_torch_state_dict()
        return {"global": [{name: tensor.numpy() for name, tensor in state.items()}]}

    def close(self) -> None:
        self.orders.put(False)


def server_app(peer: Peer) -> ServerApp:
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        work = peer.work
        strategy = FedAvg(
            fraction_train=work.clients_per_round / work.clients,
            fraction_evaluate=0.0,
            min_available_nodes=work.clients,
        )
        while peer.orders.get():
            try:
                peer.done.put(strategy.start(grid, peer.arrays, num_rounds=1))
            except BaseException as error:
                peer.done.put(error)

    return app


def client_app(folder: Path) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return trained(folder, message, int(context.node_config["partition-id"]))

    return app


@lru_cache
def work_in(folder: Path) -> Work:
    return Work.read(folder)


def trained(folder: Path, message: Message, client: int) -> Message:
    work = work_in(folder)
    network = seeded_network(work)
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    network.to(work.device).train()
    x, y = work.train[client]
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y).long())
    optimizer, steps = torch.optim.SGD(network.parameters(), work.learning_rate), 0
    for x, y in DataLoader(data, work.batch_size, shuffle=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(x.to(work.device)), y.to(work.device))
        loss.backward()
        optimizer.step()
        steps += 1
    metrics = MetricRecord({"num-examples": len(data), "steps": steps})
    content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
