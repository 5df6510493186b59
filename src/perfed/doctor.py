"""What this installation and this machine can do, and what is missing for what.

Nothing is trained and no set is read, so it takes a moment only.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import perfed
from perfed.core.errors import DataError
from perfed.data import cache
from perfed.data.cifar import IMAGE_SETS

NEEDED = ("torch", "numpy", "scikit-learn")
COMFORT = {  # training does without them
    "PyYAML": "YAML files",
    "pandas": "frames (per_client, per_round)",
    "matplotlib": "figures",
}
EXTRAS = {
    "flower": "a real federation between machines",
    "metrics": "numbers of a federation for Prometheus (perfed site metrics)",
    "ray": "--engine ray",
    "export": "models as ONNX files (perfed export-model)",
    "huggingface": "data sets of the Hugging Face Hub",
    "parquet": "perfed export --format parquet",
    "tensorboard": "--tensorboard",
    "mlflow": "--mlflow",
    "wandb": "--wandb (Weights & Biases)",
    "tune": "perfed tune with ranges",
    "docs": "building the documentation",
}
FOR_DEVELOPERS = ("dev", "fuzz")


def examine() -> dict[str, Any]:
    """All that is looked at, as JSON knows it; ``missing`` says what is not there, and for what."""
    packages = {name: installed(name) for name in (*NEEDED, *COMFORT)}
    devices, device_notes = cuda_devices()
    kernels = {"triton": installed("triton"), "C compiler": compiler()}
    extras = {extra: unmet(names) for extra, names in extras_of("perfed").items()}
    data = stored_sets(cache.default_root())
    missing = [f"{what}: pip install {n}" for n, what in COMFORT.items() if not packages[n]]
    missing += device_notes
    if any(device["capability"].startswith("9.") for device in devices):
        missing += [
            f"fast kernels for bf16: {name} is not installed"
            for name, found in kernels.items()
            if not found
        ]
    missing += [
        f"{EXTRAS.get(extra, extra)}: pip install 'perfed[{extra}]' ({', '.join(names)})"
        for extra, names in extras.items()
        if names
    ]
    missing += [f"the data set {n}: perfed data get {n}" for n, here in data.items() if not here]
    return {
        "perfed": perfed.__version__,
        "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "memory_free": free_memory(),
        "disk_free": {
            "working directory": free_disk(Path.cwd()),
            "data sets": free_disk(cache.default_root()),
        },
        "packages": packages,
        "devices": [{"name": "cpu"}, *devices],
        "kernels": kernels,
        "extras": extras,
        "data": data,
        "missing": missing,
    }


def installed(package: str) -> str | None:
    """Its version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def extras_of(package: str) -> dict[str, list[str]]:
    """What each extra asks for, as the package's own metadata say."""
    try:
        lines = metadata.requires(package) or []
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        return {}
    extras: dict[str, list[str]] = {}
    for line in lines:
        requirement, _, marker = line.partition(";")
        if found := re.search(r"extra == ['\"]([\w-]+)['\"]", marker):
            extras.setdefault(found[1], []).append(requirement.strip())
    return {name: extras[name] for name in sorted(extras) if name not in FOR_DEVELOPERS}


def unmet(requirements: list[str]) -> list[str]:
    """Those that are not installed, or in a version that does not do."""
    from packaging.requirements import Requirement

    found = []
    for text in requirements:
        wanted = Requirement(text)
        version = installed(wanted.name)
        if version is None:
            found.append(f"{wanted.name} is not installed")
        elif version not in wanted.specifier:
            found.append(f"{wanted.name} is {version}, must be {wanted.specifier}")
    return found


def cuda_devices() -> tuple[list[dict[str, Any]], list[str]]:
    """GPUs that work; why there are none, or which do not."""
    if torch.version.cuda is None:
        return [], [f"a GPU: torch {torch.__version__} is built without CUDA"]
    with warnings.catch_warnings():  # a driver that is too old only warns
        warnings.simplefilter("error")
        try:
            count = torch.cuda.device_count()
        except Exception as error:
            return [], [f"a GPU: {_first_line(error)}"]
    if not count:
        return [], ["a GPU: torch has CUDA, but sees no device"]
    devices, notes = [], []
    for number in range(count):
        try:
            free, total = torch.cuda.mem_get_info(number)
            major, minor = torch.cuda.get_device_capability(number)
        except RuntimeError as error:
            notes.append(f"cuda:{number}: {_first_line(error)}")
            continue
        devices.append(
            {
                "name": f"cuda:{number}, {torch.cuda.get_device_name(number)}",
                "memory_free": free,
                "memory_total": total,
                "capability": f"{major}.{minor}",
            }
        )
    return devices, notes


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def compiler() -> str | None:
    """The C compiler that Triton would use."""
    names = (os.environ.get("CC", ""), "gcc", "clang", "cc")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def free_memory() -> int | None:
    """Bytes that programs can have; None where the system does not say."""
    try:
        text = Path("/proc/meminfo").read_text("ascii")
    except OSError:
        return None
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None


def free_disk(folder: Path) -> int:
    """Bytes; of a folder that is not there yet, where it would be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def stored_sets(root: Path) -> dict[str, str | None]:
    """What is in the store of image sets; a damaged one says so."""
    found: dict[str, str | None] = {}
    for name in IMAGE_SETS:
        try:
            stored = cache.find(name, root)
        except DataError as error:
            found[name] = str(error)
        else:
            found[name] = f"{stored.images:,} images in {stored.folder}" if stored else None
    return found


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    memory = report["memory_free"]
    rows = [
        ("perfed", f"{report['perfed']}, Python {report['python']}, {report['platform']}"),
        ("processor", f"{report['cores']} cores"),
        ("memory free", _size(memory) if memory is not None else "unknown"),
        *((f"disk free, {where}", _size(free)) for where, free in report["disk_free"].items()),
        *((name, version or "not installed") for name, version in report["packages"].items()),
    ]
    for device in report["devices"][1:]:
        free, total = _size(device["memory_free"]), _size(device["memory_total"])
        rows.append((device["name"], f"{free} of {total} free, capability {device['capability']}"))
    if len(report["devices"]) > 1:
        rows += [(name, found or "not installed") for name, found in report["kernels"].items()]
    else:
        rows.append(("GPU", "none that can be used"))
    rows += [
        (f"perfed[{extra}]", "; ".join(names) or f"there: {EXTRAS.get(extra, extra)}")
        for extra, names in report["extras"].items()
    ]
    rows += [(f"data set {name}", here or "not stored") for name, here in report["data"].items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    lines += ["", "Everything is there." if not report["missing"] else "Missing, if you want it:"]
    return "\n".join([*lines, *(f"  {line}" for line in report["missing"])])


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
