"""How should public mini-batches treat BatchNorm? The measurement behind the default.

    python benchmarks/public_batchnorm.py digits                      (15 minutes on one core)
    python benchmarks/public_batchnorm.py FILE.npz --device cuda      (10 minutes on one H200)

PerFed-CKT (c=3, λ=1) with the three settings of ``training.public_batchnorm``; mean *validation*
accuracy of the last round, on seeds that are used for nothing else. On digits every client has the
CNN with BatchNorm, and there are two public sets: digits (like the private data) and their
negatives with noise (unlike it: another distribution of pixels, as CIFAR-100 is to CIFAR-10). On a
file of 32×32 images (``x``, ``y``, ``public``) every one of 100 clients has VGG11 with BatchNorm.

Results go to ``benchmarks/results/public_batchnorm_NAME.json``, row by row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import perfed
from perfed.core.schema import from_mapping
from perfed.data.datasets import Digits
from perfed.runs.directory import environment

MODES = ("private", "shared", "separate")
GROUPS = {"name": "groups", "groups": 3}
SKEWED = {"name": "dirichlet", "alpha": 0.1, "minimum": 20}
COMMON = {"algorithm": {"name": "perfed-ckt", "clusters": 3, "weight": 1.0}}
DIGITS = {
    "rounds": 40,
    "evaluate_every": 40,
    "models": {"architectures": [{"name": "cnn", "batchnorm": True}]},
    "training": {"learning_rate": 0.1, "steps": 10},
}
IMAGES = {
    "rounds": 40,
    "evaluate_every": 40,
    "clients": 100,
    "models": {"architectures": ["vgg11-bn"]},
    "training": {
        "learning_rate": 0.01,
        "steps": 20,
        "batch_size": 64,
        "public_batch_size": 128,
    },
}


def unlike_digits(seed: int, folder: Path) -> dict[str, Any]:
    """The same private digits, and a public set that does not look like them."""
    samples = Digits().load(seed)
    noise = np.random.default_rng(seed).normal(0, 0.5, samples.public_x.shape)
    path = folder / f"unlike-{seed}.npz"
    np.savez(path, x=samples.x, y=samples.y, public=(-samples.public_x + noise).astype(np.float32))
    return {"name": "npz", "path": str(path)}


def settings(data: str, folder: Path) -> Iterator[tuple[str, dict[str, Any], range]]:
    """A name, the experiment, and the seeds to run it with."""
    if data != "digits":
        for name, partition in (("groups", GROUPS), ("dirichlet 0.1", SKEWED)):
            source = {"name": "npz", "path": data}
            yield name, IMAGES | {"data": source, "partition": partition}, range(1000, 1001)
        return
    for name, partition in (("groups", GROUPS), ("dirichlet 0.1", SKEWED), ("iid", "iid")):
        seeds = range(1000, 1004)
        yield f"{name}, public like private", DIGITS | {"partition": partition}, seeds
        yield f"{name}, public unlike private", DIGITS | {"partition": partition}, seeds


def validation_accuracy(experiment: dict[str, Any], device: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        built = from_mapping(perfed.Experiment, COMMON | experiment)
        summary = perfed.run(
            built, Path(folder) / "run", how=perfed.Execution(device=device)
        ).summary
    return float(summary["models"]["personal"]["last"]["validation_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", help="'digits', or an .npz file of 32×32 images")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="only settings whose name starts so")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, help="fewer, to try it out")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    name = "_".join(["public_batchnorm", Path(arguments.data).stem, *arguments.only.split()])
    out = arguments.out / f"{name}.json"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for setting, experiment, seeds in settings(arguments.data, Path(folder)):
            if not setting.startswith(arguments.only):
                continue
            if arguments.rounds:
                experiment |= {"rounds": arguments.rounds, "evaluate_every": arguments.rounds}
            for mode in arguments.modes:
                values = []
                for seed in seeds:
                    changed = experiment | {"seed": seed}
                    changed["training"] = experiment["training"] | {"public_batchnorm": mode}
                    if "unlike" in setting:
                        changed["data"] = unlike_digits(seed, Path(folder))
                    values.append(validation_accuracy(changed, arguments.device))
                rows.append({"setting": setting, "mode": mode, "seeds": list(seeds)})
                rows[-1] |= {"validation_accuracy": values}
                print(f"{setting:34} {mode:9} {statistics.mean(values):.3f}", values, flush=True)
                record = {
                    "command": f"python benchmarks/public_batchnorm.py {Path(arguments.data).name}",
                    "environment": environment(torch.device(arguments.device)),
                    "rows": rows,
                }
                out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
