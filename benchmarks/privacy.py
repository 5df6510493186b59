"""What privacy costs: accuracy against ε, on digits.

    python benchmarks/privacy.py                 all runs; render.py draws docs/privacy-epsilon.png
    python benchmarks/privacy.py --workers 15    on several processes; resumable

57 runs of one or two seconds of one core. Each is written down when it ends, so that a second
start goes on. ``--link`` measures what the preset ``presets/links/private.yaml`` costs, in its own
record.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

from committed import RESULTS

SEEDS = (0, 1, 2)
BUDGETS = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
METHODS = ("perfed-ckt", "perfed-kin", "fedavg")
STEPS, ROUNDS, BATCH = 10, 15, 16
CLIP = 3.0
"""Of 1, 3 and 10, by the validation accuracy of FedAvg and PerFed-CKT at ε = 8 and 64, on seeds
1000 and 1001, which are used for nothing else."""
FRAME: dict[str, Any] = {
    "name": "privacy",
    "rounds": ROUNDS,
    "clients": 10,
    "clients_per_round": 10,
    "evaluate_every": ROUNDS,
    "data": {"name": "digits", "public": 300},
    "partition": {"name": "dirichlet", "alpha": 0.5},
    "split": {"train": [0.5], "validation": 0.1, "test": 0.4},
    "models": {"architectures": [{"name": "mlp", "hidden": [64]}]},
    "training": {
        "learning_rate": 0.1,
        "steps": STEPS,
        "batch_size": BATCH,
        "public_batch_size": 32,
    },
}
TYPICAL = 75
"""Training samples of a client; the noise of a budget is the one that lets it take part to the
end. Who has fewer spends faster, and stops earlier."""


def privacy_of(budget: float | None) -> dict[str, Any] | None:
    from perfed.core.privacy import noise_for, sampling_rate

    if budget is None:
        return None
    noise = noise_for(budget, 1e-5, sampling_rate(BATCH, TYPICAL), STEPS * ROUNDS)
    return {"noise": round(noise, 3), "clip": CLIP, "delta": 1e-5, "epsilon": budget}


def link_privacy() -> dict[str, Any]:
    from perfed.config import load_yaml

    text = (resources.files("perfed") / "presets/links/private.yaml").read_text("utf-8")
    found: dict[str, Any] = load_yaml(text, "private.yaml")["privacy"]
    return found


def job(algorithm: str, privacy: dict[str, Any] | None, seed: int) -> dict[str, Any]:
    import torch

    from perfed import Execution, Experiment, run
    from perfed.core.schema import from_mapping

    torch.set_num_threads(1)
    settings = FRAME | {"algorithm": algorithm, "privacy": privacy, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        how = Execution(device="cpu", save_models=False)
        result = run(from_mapping(Experiment, settings), Path(folder) / "run", how=how)
        kind = next(iter(result.summary["models"]))
        last = result.summary["models"][kind]["last"]
        return {
            "algorithm": algorithm,
            "privacy": privacy,
            "seed": seed,
            "model": kind,
            "accuracy": last["test_accuracy"],
            "spent": result.summary.get("privacy"),
            "environment": result.directory.read_json("environment.json"),
        }


def all_jobs(link: bool) -> list[tuple[str, dict[str, Any] | None, int]]:
    jobs = []
    for seed in SEEDS:
        jobs.append(("local", None, seed))
        for method in METHODS:
            levels = [link_privacy()] if link else map(privacy_of, BUDGETS)
            jobs += [(method, privacy, seed) for privacy in [None, *levels]]
    return jobs


def name_of(job: tuple[str, Any, int]) -> str:
    return json.dumps(job, sort_keys=True)


def measure(path: Path, link: bool, workers: int) -> None:
    record = json.loads(path.read_text("utf-8")) if path.is_file() else {"runs": {}}
    wanted = {name_of(one): one for one in all_jobs(link)}
    left = [one for name, one in wanted.items() if name not in record["runs"]]
    with ProcessPoolExecutor(workers) as pool:
        futures = {name_of(one): pool.submit(job, *one) for one in left}
        for name, future in futures.items():
            line = future.result()
            record["environment"] = line.pop("environment")
            record["frame"] = FRAME
            record["runs"][name] = line
            record["runs"] = {k: v for k, v in record["runs"].items() if k in wanted}
            path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            print(name, f"{100 * line['accuracy']:.1f}", flush=True)


def accuracies(record: dict[str, Any], algorithm: str, budget: float | None) -> list[float]:
    """Percent, by seed; without a budget, those without privacy."""
    return [
        100 * run["accuracy"]
        for run in record["runs"].values()
        if run["algorithm"] == algorithm and (run["privacy"] or {}).get("epsilon") == budget
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--link", action="store_true")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    path = RESULTS / ("privacy_link.json" if given.link else "privacy.json")
    measure(path, given.link, given.workers)


if __name__ == "__main__":
    main()
