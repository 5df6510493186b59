"""Several machines: Ray's own cluster utility starts each as processes here. What a worker has and
what it loses with its machine is real; the network between them is not."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perfed
from perfed import Execution
from perfed.algorithms.ditto import Ditto
from perfed.core.algorithm import Client
from perfed.core.message import Message
from perfed.core.schema import from_mapping, option
from perfed.engines.ray import cluster as ray_cluster
from perfed.engines.ray.cluster import import_ray, session
from perfed.runs.directory import RunDirectory
from perfed.runs.simulation import Simulation
from tests.runs.test_resume import contents

pytest.importorskip("ray", reason="Ray is not installed: pip install 'perfed[ray]'")


@dataclass(frozen=True)
class Waiting(Ditto):
    """In round 1 its clients train until a file is there: meanwhile something happens."""

    until: str = option("", "the file")

    def client_round(self, client: Client, message: Message) -> Message:
        while client.round == 1 and not Path(self.until).exists():
            time.sleep(0.05)
        return super().client_round(client, message)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A machine with one core, where the run is started; others can be added."""
    import_ray()
    from ray.cluster_utils import Cluster

    # A machine that is gone is noticed in a second, not in half a minute.
    system = {"health_check_period_ms": 300, "health_check_failure_threshold": 3}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": system}
    made = Cluster(initialize_head=True, head_node_args=head)
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    monkeypatch.setattr(ray_cluster, "FREE_CORE", 1.0)
    try:
        yield made
    finally:
        made.shutdown()


class After(perfed.Callback):
    """Does something when a round has ended."""

    def __init__(self, round: int, what: Callable[[], Any]) -> None:
        self.round, self.what = round, what

    def on_round(self, report: perfed.runs.RoundReport) -> None:
        if report.round == self.round:
            self.what()


def lose_machine(cluster: Any, node: Any) -> None:
    """All its processes at once. Workers outlive what started them by a second."""
    (raylet,) = node.all_processes["raylet"]
    listed = ["pgrep", "-P", str(raylet.process.pid)]
    workers = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
    cluster.remove_node(node, allow_graceful=False)
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(worker), signal.SIGKILL)


def played(folder: Path, name: str, *callbacks: perfed.Callback) -> Path:
    """A run. Its data is gone before a worker starts: nobody but who began it can read it."""
    random, file = np.random.default_rng(0), folder / "samples.npz"
    x = random.integers(0, 256, (120, 1, 8, 8)).astype(np.uint8)
    np.savez(file, x=x, y=random.integers(0, 3, 120))
    values = {
        "rounds": 4,
        "clients": 6,
        "clients_per_round": 4,
        "evaluate_every": 2,
        "data": {"name": "npz", "path": str(file)},
        "partition": "iid",
        "models": [{"name": "mlp", "hidden": [4]}],
        "training": {"steps": 2, "batch_size": 4},
        "algorithm": {"name": "tests.engines.test_cluster:Waiting", "until": str(folder / "now")},
    }
    two = Execution(engine="ray", device="cpu", workers=2, checkpoint_seconds=0)
    simulation = Simulation(from_mapping(perfed.Experiment, values), callbacks, two)
    file.unlink()
    return simulation.finish_in(RunDirectory.create(folder / name)).path


@pytest.mark.long
def test_a_machine_lost_in_a_round_and_one_that_joins_change_nothing(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second, now = cluster.add_node(num_cpus=1), tmp_path / "now"

    def lose() -> None:
        lose_machine(cluster, second)
        now.touch()

    lost = After(0, lambda: threading.Timer(0.3, lose).start())
    joins = After(1, lambda: cluster.add_node(num_cpus=1))
    caplog.set_level(logging.WARNING)
    with session():  # the workers of the first run are those of the second
        now.touch()
        undisturbed = played(tmp_path, "undisturbed")
        now.unlink()
        run = played(tmp_path, "disturbed", lost, joins)
    assert contents(run) == contents(undisturbed)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert re.search(r"(?s)has died.*no core is free for.*has a core of its own again", said)
