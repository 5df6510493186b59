"""Shared by all tests: small experiments, and float64 where exactness is the point."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from perfed import Experiment
from perfed.core.channel import Channel
from perfed.core.schema import from_mapping
from perfed.engines import Execution
from perfed.engines.precision import ISA, WITHOUT_TILES, bf16_crashes_here
from perfed.runs import checksums
from perfed.runs.simulation import Simulation
from tests import attacks
from tests.attacks import pytest_addoption, pytest_configure  # noqa: F401 - hooks of pytest

# The processes of pytest-xdist and those that tests start inherit it, and do not try again.
if ISA not in os.environ and bf16_crashes_here():
    os.environ[ISA] = WITHOUT_TILES

# Whoever starts the tests in the background may have them ignore Ctrl-C, and the programs that they
# start would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A machine may be busy: how long an example takes says nothing about whether it is right.
settings.register_profile("perfed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("perfed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests first, or one process of two is idle in the end; those with Ray side by side."""
    attacks.pytest_collection_modifyitems(config, items)
    items.sort(key=lambda item: (item.get_closest_marker("long") is None, not uses_ray(item)))


_ray = contextlib.ExitStack()


@pytest.hookimpl(tryfirst=True)  # where the tests are started, not where one of them goes
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Ray is slow to start. Tests that follow each other have one, and its idle workers."""
    if uses_ray(item):
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'perfed[ray]'")
        from perfed.engines.ray import session

        _ray.enter_context(session()).count("CPU")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if not uses_ray(nextitem):
        _ray.close()


def uses_ray(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("ray") is not None


# Networks that the tests of every algorithm share give features of one width, as some methods need.
MLP_50: dict[str, Any] = {"name": "mlp", "hidden": [50]}
"""As wide as the CNN."""

TINY: dict[str, Any] = {
    "rounds": 3,
    "clients": 6,
    "clients_per_round": 3,
    "data": {"name": "digits", "public": 30},
    "partition": {"name": "groups", "groups": 2},
    "models": {
        "architectures": [{"name": "mlp", "hidden": [8]}, {"name": "mlp", "hidden": [12, 8]}]
    },
    "training": {"steps": 2, "batch_size": 8, "public_batch_size": 8, "learning_rate": 0.1},
    "algorithm": {"name": "perfed-ckt", "clusters": 2},
}


FEW: dict[str, dict[str, Any]] = {
    "cosmos": {"clusters": 2, "digest_steps": 2, "steps": 5},
    "kt-pfl": {"digest_steps": 2},
    "perfed-ckt": {"clusters": 2},
    "hypcluster": {"clusters": 2},
    "feddf": {"steps": 20},
    "selective-fd": {"digest_steps": 2, "ambiguity": 1},
    "pfedme": {"personal_steps": 2},
    "fedtgp": {"epochs": 3},
    "fedmd": {"warmup_steps": 3},
    "cfd": {"student_steps": 20},
    "fedgen": {"steps": 5},
    "fedmrl": {"small": {"name": "mlp", "hidden": [8]}},
}


def spec(name: str) -> dict[str, Any]:
    """An algorithm for a small experiment, with few clusters and few steps on the server."""
    return {"name": name, **FEW.get(name, {})}


def tiny(**changes: Any) -> Experiment:
    """A small experiment; keyword arguments replace top-level keys."""
    return from_mapping(Experiment, TINY | changes)


SEQUENTIAL = Execution(engine="sequential", device="cpu")
STACKED = Execution(engine="stacked", device="cpu")
RAY = Execution(engine="ray", device="cpu", workers=2)


def simulate(how: Execution = SEQUENTIAL, **changes: Any) -> Simulation:
    """On the reference engine, unless told otherwise."""
    return Simulation(tiny(**changes), how=how)


def played(rounds: int, channel: Channel | None = None, **changes: Any) -> Simulation:
    """A simulation after some rounds, without a directory."""
    simulation, channel = simulate(**changes), channel or Channel()
    simulation.begin(channel)
    for round in range(rounds):
        simulation.play_round(round, channel)
    return simulation


def without_checksums(run: Path) -> Path:
    """A run directory made what earlier versions wrote: a test may then change its files."""
    (run / checksums.FILE).unlink()
    for file in run.rglob("*.json"):
        values = json.loads(file.read_text())
        for key in ("checksum", "log_sums"):
            values.pop(key, None)
        file.write_text(json.dumps(values))
    return run


@pytest.fixture
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run side by side, and bits must not depend on how many cores are free."""
    torch.set_num_threads(1)
