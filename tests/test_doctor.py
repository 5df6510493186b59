"""What ``perfed doctor`` finds, against machines that are made up."""

from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from perfed import doctor
from perfed.core.errors import DataError
from perfed.data import cache


def test_what_is_installed_is_what_imports_say() -> None:
    report = doctor.examine()
    assert report["packages"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert all(report["packages"].values())
    assert set(report["extras"]) == set(doctor.EXTRAS)  # each says what it is for


def test_an_extra_that_is_not_there_is_named_with_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = metadata.version

    def version(name: str) -> str:
        if name == "ray":
            raise metadata.PackageNotFoundError(name)
        return "1.40.0" if name == "flwr" else there(name)

    monkeypatch.setattr(metadata, "version", version)
    report = doctor.examine()
    assert report["extras"]["ray"] == ["ray is not installed"]
    (flower,) = report["extras"]["flower"]
    assert flower.startswith("flwr is 1.40.0, must be ")
    assert "--engine ray: pip install 'perfed[ray]' (ray is not installed)" in report["missing"]
    assert "ray is not installed" in doctor.render(report)


def test_a_source_tree_that_is_not_installed_has_no_extras() -> None:
    assert doctor.extras_of("no-such-package") == {}


@pytest.mark.parametrize(
    ("requirement", "unmet"),
    [
        ("torch>=1", []),
        ("torch>=1000", ["torch is VERSION, must be >=1000"]),
        ("no-such-package>=1", ["no-such-package is not installed"]),
        ("mkdocstrings[python]>=0.1", []),
    ],
)
def test_requirements_are_met_by_version(requirement: str, unmet: list[str]) -> None:
    expected = [line.replace("VERSION", metadata.version("torch")) for line in unmet]
    assert doctor.unmet([requirement]) == expected


def test_gpus_that_work_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def memory(number: int) -> tuple[int, int]:
        if number:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return 3 * 2**30, 4 * 2**30

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: "Fast One")
    monkeypatch.setattr(doctor, "compiler", lambda: None)
    report = doctor.examine()
    assert [device["name"] for device in report["devices"]] == ["cpu", "cuda:0, Fast One"]
    assert "cuda:1: CUDA error: out of memory" in report["missing"]
    assert "fast kernels for bf16: C compiler is not installed" in report["missing"]
    assert "3.0 GiB of 4.0 GiB free, capability 9.0" in doctor.render(report)


@pytest.mark.parametrize(
    ("built", "count", "says"),
    [
        (None, lambda: 0, "is built without CUDA"),
        ("13.0", lambda: 0, "a GPU: torch has CUDA, but sees no device"),
        ("13.0", lambda: 1 / 0, "a GPU: division by zero"),
    ],
)
def test_why_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, built: str | None, count: Any, says: str
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "device_count", count)
    devices, notes = doctor.cuda_devices()
    assert devices == []
    assert says in notes[0]


def test_sets_that_are_stored_absent_or_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(name: str, root: Path) -> cache.Stored | None:
        if name == "cifar10":
            return cache.Stored(root / name, {"images": 60_000})
        raise DataError("is in the way")

    monkeypatch.setattr(cache, "find", find)
    found = doctor.stored_sets(tmp_path)
    assert found == {
        "cifar10": f"60,000 images in {tmp_path / 'cifar10'}",
        "cifar100": "is in the way",
    }
    monkeypatch.undo()
    assert doctor.stored_sets(tmp_path / "not" / "there") == {"cifar10": None, "cifar100": None}
    assert doctor.free_disk(tmp_path / "not" / "there") > 0
