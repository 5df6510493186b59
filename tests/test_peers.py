"""``benchmarks/peers.py``: what it asks workers, and what it makes of their answers."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfed.core.pixels import scaled

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))


@pytest.fixture
def driver(inside: None) -> Any:
    spec = importlib.util.spec_from_file_location("peers_driver", BENCHMARKS / "peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def test_a_peer_is_named_with_its_variant_source_and_python(driver: Any) -> None:
    spec = driver.Spec.parse("perfed/stacked-bf16@old=/somewhere/src:/venv/bin/python")
    assert (spec.adapter, spec.variant) == ("perfed", "stacked-bf16")
    assert (spec.source, spec.python) == ("/somewhere/src", "/venv/bin/python")
    assert driver.Spec.parse("flower=").source == ""


def test_models_that_learned_less_are_not_alike(driver: Any) -> None:
    first = {"global": {"train_loss": 1.0}}
    assert driver.alike({"global": {"train_loss": 1.09}}, first)
    assert not driver.alike({"global": {"train_loss": 1.2}}, first)
    assert not driver.alike({"personal": {"train_loss": 1.0}}, first)


def test_turns_that_others_disturb_are_taken_again(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbance = iter([2.0, 0.1, 1.0, 0.2, 0.0])
    turns = driver.Turns("mlp", [], "cpu", 1, tmp_path, tmp_path / "lock", 60)
    turns.rows = {"one": {}}

    def turn(reverse: bool) -> Any:
        others = next(disturbance)
        return driver.Turn({"one": {"seconds": others, "cpu_seconds": 0.0}}, others)

    monkeypatch.setattr(turns, "_turn", turn)
    turns._take_turns(rounds=2, most=8, seconds=60)
    assert turns.others_cpus == [0.1, 0.2]
    assert turns.rows["one"]["seconds"] == [0.1, 0.2]
    turns._take_turns(rounds=2, most=8, seconds=0)
    assert turns.others_cpus == [0.0]  # one turn in any case, and no more after the time


def test_cpu_seconds_are_those_of_all_descendants(inside: None) -> None:
    import processes

    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert processes.others_cpu_seconds(os.getpid()) >= 0.25
        assert child.pid in processes.family(os.getpid())
        assert processes.resident_bytes([child.pid]) > 2**20
        child.communicate(b"\n")


@pytest.mark.parametrize("variant", ["sequential", "mapped-sequential"])
def test_perfed_as_a_peer_starts_from_the_shared_weights_and_learns(
    inside: None, tmp_path: Path, variant: str
) -> None:
    from dataclasses import replace

    from drive_perfed import Peer
    from work import Work
    from works import WORKLOADS, prepare

    small = replace(WORKLOADS["mlp"], clients=4, clients_per_round=2, steps=4, batch_size=4)
    prepare(small, tmp_path, "cpu", 1)
    work = Work.read(tmp_path)
    assert [len(y) for _, y in work.train] == [16] * 4  # one epoch is the steps
    peer = Peer(work, variant, "")
    assert peer.simulation.federation.train_sizes.tolist() == [16] * 4
    assert peer.simulation.population.has_all_samples == (variant == "sequential")
    before = peer.models()["global"][0]
    assert all((before[name] == array).all() for name, array in work.initial().items())
    assert peer.counted_round() == 8
    assert any((peer.models()["global"][0][n] != a).any() for n, a in before.items())


def test_a_worker_answers_and_says_why_it_cannot(inside: None, tmp_path: Path) -> None:
    (tmp_path / "drive_none.py").write_text("raise RuntimeError('needs a newer Python')")
    worker = subprocess.run(
        [sys.executable, BENCHMARKS / "peers" / "worker.py", "none", "", "", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    answer = json.loads(worker.stdout.removeprefix("@"))
    assert answer == {"error": "RuntimeError: needs a newer Python"}


def test_a_peer_that_does_not_answer_is_ended_and_the_record_says_so(
    driver: Any, inside: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from works import WORKLOADS, prepare

    (tmp_path / "drive_asleep.py").write_text("import time\ntime.sleep(1000)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    folder = tmp_path / "work"
    folder.mkdir()
    prepare(WORKLOADS["mlp"], folder, "cpu", 1)
    work = driver.Work.read(folder)
    spec = driver.Spec.parse("asleep=")
    turns = driver.Turns("mlp", [spec], "cpu", 1, tmp_path, tmp_path / "lock", 0.5)
    turns._start(spec, folder, work)
    worker = turns.workers["asleep"]
    turns._begin(spec)
    assert turns.failed == {"asleep": "no answer within 0.5 seconds"}
    assert not turns.workers
    assert worker._process.wait(60) == -signal.SIGKILL


def test_an_absent_package_can_be_imported_and_not_used(
    inside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stand_ins

    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(stand_ins, "SAID", [])
    stand_ins.stand_in_for("absent_one", "absent_two", "numpy")
    from absent_one.part import something  # type: ignore[import-not-found]

    assert importlib.import_module("numpy").zeros(1) == 0  # what is installed stays
    assert stand_ins.SAID == ["absent_one, absent_two, imported but not used"]
    with pytest.raises(RuntimeError, match=r"absent_one\.part\.something is used"):
        something(1)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("absent_three")


def test_steps_are_those_that_optimizers_take(inside: None, tmp_path: Path) -> None:
    import torch
    from torch_peer import TorchPeer
    from work import Work
    from works import WORKLOADS, prepare

    class ThreeSteps(TorchPeer):
        def round(self) -> None:
            optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
            for _ in range(3):
                optimizer.step()

    prepare(WORKLOADS["mlp"], tmp_path, "cpu", torch.get_num_threads())
    peer = ThreeSteps(Work.read(tmp_path), "")
    assert peer.counted_round() == 3
    peer.round()
    assert peer.counted_round() == 3  # what is not counted stays out


def test_the_table_compares_with_perfed_at_the_same_precision(
    inside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from peers_blocks import _on_gpu

    def row(peer: str, *seconds: float) -> dict[str, Any]:
        return {"peer": peer, "seconds": seconds, "device_peak_mib": 1000}

    rows = [
        row("perfed/float32", 2.0, 2.0, 4.0),
        row("perfed/bf16", 0.2, 0.1, 0.1),
        row("pfllib", 6.0, 8.0, 8.0),
        row("pfllib/tf32", 3.0, 3.0, 3.0),
    ]
    columns = _on_gpu(rows)
    assert columns["times perfed, same precision"] == ["1.00", "1.00", "3.00", ""]
    assert columns["times perfed, bf16"] == ["20.00", "1.00", "80.00", "30.00"]


def test_pictures_are_bytes_for_perfed_and_the_same_numbers_for_the_others(
    inside: None, tmp_path: Path
) -> None:
    from dataclasses import replace

    from drive_perfed import Peer
    from work import Work
    from works import WORKLOADS, prepare

    small = replace(WORKLOADS["fedavg"], clients=3, clients_per_round=2, steps=2, batch_size=4)
    prepare(small, tmp_path, "cpu", 1)
    work = Work.read(tmp_path)
    for variant in ("sequential", "mapped-sequential"):
        peer = Peer(work, variant, "")
        assert peer.simulation.population.x.element_size() == 1
    federation = Peer(work, "sequential", "").simulation.federation
    assert np.std(federation.samples.x) > 30  # not black and white
    for (x, y), split in zip(work.train, federation.splits, strict=True):
        assert x.dtype == np.float32
        assert np.array_equal(x, scaled(federation.samples.x[split.train]))
        assert np.array_equal(y, federation.samples.y[split.train])
