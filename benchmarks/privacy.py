"""What privacy costs: accuracy against ε, on digits.

    python benchmarks/privacy.py                 all runs, then docs/privacy-epsilon.png
    python benchmarks/privacy.py --workers 15    on several processes; resumable

About 60 runs of five seconds of one core. Each is written down when it ends, so that a second
start goes on. ``--link`` measures what the preset ``presets/links/private.yaml`` costs, in its own
record.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

from committed import RESULTS, ROOT

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


def draw(record: dict[str, Any], path: Path) -> None:
    """Accuracy against ε; a band for one standard deviation over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    runs = list(record["runs"].values())
    figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")

    def accuracy(algorithm: str, budget: float | None) -> list[float]:
        return [
            100 * run["accuracy"]
            for run in runs
            if run["algorithm"] == algorithm and (run["privacy"] or {}).get("epsilon") == budget
        ]

    alone = statistics.mean(accuracy("local", None))
    axes.axhline(alone, color="0.4", lw=1.2, ls="--", label="local: sends nothing, ε = 0")
    for number, method in enumerate(METHODS):
        values = [accuracy(method, budget) for budget in BUDGETS]
        means = [statistics.mean(v) for v in values]
        spread = [statistics.stdev(v) for v in values]
        colour = f"C{number}"
        axes.plot(BUDGETS, means, marker="o", color=colour, label=method)
        low = [m - s for m, s in zip(means, spread, strict=True)]
        high = [m + s for m, s in zip(means, spread, strict=True)]
        axes.fill_between(BUDGETS, low, high, color=colour, alpha=0.15, lw=0)
        open_end = statistics.mean(accuracy(method, None))
        axes.plot(BUDGETS[-1] * 2.2, open_end, marker="s", color=colour, ls="none")
    axes.set_xscale("log", base=2)
    ticks = [*BUDGETS, BUDGETS[-1] * 2.2]
    axes.set_xticks(ticks, [f"{b:g}" for b in BUDGETS] + ["none"])
    axes.set_xlabel("ε, the most that a client spends (δ = 1e-5); none: without privacy")
    axes.set_ylabel("test accuracy, %")
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--link", action="store_true")
    parser.add_argument("--draw", action="store_true", help="only the figure, from the record")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    path = RESULTS / ("privacy_link.json" if given.link else "privacy.json")
    if not given.draw:
        measure(path, given.link, given.workers)
    if not given.link:
        draw(json.loads(path.read_text("utf-8")), ROOT / "docs" / "privacy-epsilon.png")


if __name__ == "__main__":
    main()
