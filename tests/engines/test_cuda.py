"""Where there is a GPU, every algorithm gives there what it gives on the CPU."""

from pathlib import Path

import pytest
import torch

import perfed
from perfed import Execution
from perfed.core.channel import Channel
from perfed.runs.simulation import Simulation
from tests.conftest import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def losses(name: str, device: str, engine: str) -> list[float]:
    spec = {"name": name, "clusters": 2} if name in ("perfed-ckt", "hypcluster") else name
    models = ["mlp", {"name": "cnn", "batchnorm": True}]
    simulation = Simulation(
        tiny(algorithm=spec, models=models), how=Execution(device=device, engine=engine)
    )
    channel = Channel()
    simulation.begin(channel)
    for round in range(3):
        simulation.play_round(round, channel)
    columns = simulation.population.evaluate(simulation._evaluation_messages(3), 3)
    return [value for kind in columns.values() for value in kind["test_loss"].tolist()]


def test_a_run_resumes_on_the_gpu(tmp_path: Path) -> None:
    class Stop(perfed.Callback):
        def on_round(self, report: perfed.runs.RoundReport) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perfed.run(
            tiny(),
            tmp_path / "run",
            callbacks=[Stop()],
            how=Execution(device="cuda", checkpoint_seconds=0),
        )
    assert perfed.resume(tmp_path / "run", how=Execution(device="cuda")).summary["finished"]


@pytest.mark.parametrize("name", list(perfed.algorithms))
def test_the_same_numbers_on_the_gpu(name: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    assert losses(name, "cuda") == pytest.approx(losses(name, "cpu"), rel=1e-3)
