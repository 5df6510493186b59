"""Which engine, device and precision a run gets, and that it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import perfed
from perfed import Execution
from perfed.core.channel import Channel
from perfed.core.errors import ConfigError, RunError
from perfed.engines import SequentialEngine
from perfed.engines.execution import fitting_threads
from perfed.engines.stacked import StackedEngine
from perfed.engines.work import forward_flops
from perfed.runs.comparison import resume_comparison
from perfed.runs.directory import RunDirectory
from perfed.runs.simulation import Simulation, as_recorded
from tests.conftest import SEQUENTIAL, STACKED, tiny


def test_the_default_is_the_stacked_engine() -> None:
    assert isinstance(Execution(device="cpu").build_engine(), StackedEngine)
    asked = Execution(device="cpu", engine="sequential")
    assert isinstance(asked.build_engine(), SequentialEngine)
    assert Execution().torch_device().type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_a_gpu_without_double_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Mac's is: metrics and means would stop the run later, with a traceback."""

    def zeros(*_: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device.type == "mps"
        if dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype\nUse float32 instead.")
        return torch.ones(1)

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ConfigError, match=r"^device 'mps' cannot be used: Cannot .* dtype$"):
        Execution(device="mps").torch_device()


def test_the_stacked_engine_is_imported_when_it_is_used() -> None:
    code = "import perfed, sys; print([m for m in sys.modules if m.startswith('perfed.engines.s')])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "perfed.engines.sequential" in said.stdout
    assert "perfed.engines.stacked" not in said.stdout


@pytest.mark.parametrize(
    ("said", "found"), [({}, "passive"), ({"OMP_WAIT_POLICY": "active"}, "active")]
)
def test_threads_sleep_while_they_wait_unless_told_otherwise(
    said: dict[str, str], found: str
) -> None:
    """It must be said before torch is loaded."""
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch': print(os.environ.get('OMP_WAIT_POLICY'))\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import perfed"
    )
    environment = {name: v for name, v in os.environ.items() if name != "OMP_WAIT_POLICY"} | said
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert told.stdout.split() == [found]


@pytest.mark.parametrize(
    "stub",
    [
        "sys.modules['torch._functorch.pyfunctorch'] = None",  # importing it fails
        "del torch._C._functorch._add_batch_dim",
        "del torch._C._create_function_from_graph",
    ],
)
def test_without_torchs_private_parts_clients_run_one_after_another(stub: str) -> None:
    """In a process of its own: torch's operations cannot be registered twice."""
    code = f"""
import sys, torch, perfed
from perfed import Execution
{stub}
for how in (Execution(device="cpu"), Execution(device="cpu", engine="stacked")):
    print(how.build_engine().name)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sequential", "sequential"]
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"engine stacked does not work with torch {torch.__version__} (")
    assert line.endswith("clients train one after another, engine sequential")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"engine": "magic"}, "sequential"),
        ({"precision": "int3"}, "bf16"),
        ({"store_limit": -1}, "at least 0"),
        ({"store_limit": float("inf")}, "finite"),
    ],
)
def test_wrong_choices(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Execution(**wrong)


def test_tf32_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match="GPU"):
        Execution(device="cpu", precision="tf32").build_engine()


def test_a_resumed_comparison_goes_on_in_one_precision(tmp_path: Path) -> None:
    class StopInSeedOne(perfed.Callback):
        def on_round(self, report: perfed.runs.RoundReport) -> None:
            if report.experiment.seed == 1:
                raise KeyboardInterrupt

    comparison = perfed.Comparison(experiment=tiny(), algorithms=("local",), seeds=(0, 1, 2))
    how = Execution(device="cpu", precision="bf16", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.compare(comparison, tmp_path / "all", callbacks=[StopInSeedOne()], how=how)
    result = resume_comparison(tmp_path / "all")
    said = [json.loads((run.path / "environment.json").read_text()) for run in result.results]
    assert [one["precision"] for one in said] == ["bf16"] * 3


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [("local", "batch_size"), ("perfed-ckt", "batch_size"), ("perfed-ckt", "public_batch_size")],
)
def test_batchnorm_of_one_value_is_refused(algorithm: str, key: str) -> None:
    spec = {"name": algorithm, "clusters": 2} if algorithm == "perfed-ckt" else algorithm
    training = {"steps": 1, "batch_size": 8, "public_batch_size": 8, key: 1}
    experiment = tiny(models=[f"{__name__}:OneValue"], training=training, algorithm=spec)
    for how in (SEQUENTIAL, STACKED):
        with pytest.raises(ConfigError, match=f"^training.{key}: BatchNorm .* at least 2"):
            Simulation(experiment, how=how)


def test_batchnorm_of_the_places_of_one_image_is_not() -> None:
    models = [{"name": "cnn", "batchnorm": True}]
    experiment = tiny(models=models, training={"batch_size": 1}, algorithm="local")
    Simulation(experiment, how=SEQUENTIAL).play_round(0, Channel())


class OneValue(nn.Sequential):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))


def test_a_run_goes_on_on_the_engine_it_began_on(tmp_path: Path) -> None:
    class Stop(perfed.Callback):
        def on_round(self, report: perfed.runs.RoundReport) -> None:
            raise KeyboardInterrupt

    how = Execution(engine="sequential", device="cpu", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(tiny(), tmp_path / "run", callbacks=[Stop()], how=how)
    begun = RunDirectory(tmp_path / "run")
    assert as_recorded(begun, Execution(device="cpu")).engine == "sequential"
    assert as_recorded(begun, Execution(device="cpu", engine="stacked")).engine == "stacked"


def test_large_layers_use_all_threads_where_clients_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    found = {}
    for how in (SEQUENTIAL, STACKED):
        for large in (False, True):
            shape = {"models": [{"name": "mlp", "hidden": [4096 if large else 8]}]}
            training = {"batch_size": 64, "steps": 1}
            population = Simulation(tiny(training=training, **shape), how=how).population
            found[how.engine, large] = fitting_threads(population)
    assert found.pop(("sequential", True)) == 4
    assert set(found.values()) == {1}


def test_what_a_network_computes_is_counted() -> None:
    """A multiplication and an addition for each weight, and each time it is used."""
    steps, channels = 20, 16
    sequence, picture = torch.zeros(1, steps, channels), torch.zeros(1, 3, 8, 8)
    assert forward_flops(nn.Linear(64, 10), torch.zeros(1, 64)) == 2 * 64 * 10
    assert forward_flops(nn.Conv2d(3, 5, 3, padding=1), picture) == 2 * 8 * 8 * 5 * 3 * 3 * 3
    for kind, gates in ((nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)):
        layer = kind(channels, 32, batch_first=True)
        assert forward_flops(layer, sequence) == 2 * steps * gates * 32 * (channels + 32)


def test_a_run_says_how_it_was_executed_and_goes_on_so(tmp_path: Path) -> None:
    class Stop(perfed.Callback):
        def on_round(self, report: perfed.runs.RoundReport) -> None:
            raise KeyboardInterrupt

    how = Execution(device="cpu", precision="bf16", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(tiny(), tmp_path / "run", callbacks=[Stop()], how=how)
    said = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (said["engine"], said["precision"]) == ("stacked", "bf16")
    with pytest.raises(RunError, match="begun in bf16"):
        perfed.resume(tmp_path / "run", how=Execution(precision="float32"))
    whole = perfed.run(tiny(), tmp_path / "whole", how=how)
    resumed = perfed.resume(tmp_path / "run")  # in bf16, without being told
    assert resumed.summary == whole.summary


def test_other_devices_have_the_plain_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Mac's GPU, which torch cannot give here."""
    monkeypatch.setattr(Execution, "torch_device", lambda self: torch.device("xpu"))
    assert Execution(device="xpu").build_engine().name == "sequential"
    with pytest.raises(ConfigError, match="xpu has sequential"):
        Execution(device="xpu", engine="stacked").build_engine()
