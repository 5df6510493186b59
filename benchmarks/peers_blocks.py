"""The tables of ``benchmarks/peers.py``."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from committed import ROOT, machine, result

NAMES = {
    "perfed": "perfed",
    "pfllib": "PFLlib",
    "flbench": "FL-bench",
    "htfllib": "HtFLlib",
    "pflresearch": "pfl-research",
    "fedjax": "fedjax",
    "flower": "Flower",
    "blazefl": "BlazeFL",
}


PRECISIONS = ("float32", "tf32", "bf16")


def peers(name: str) -> str:
    if not (ROOT / "benchmarks" / "results" / f"{name}.json").is_file():
        return "No record yet."
    record = result(name)
    parts = [part for work in record.values() for part in _work(work)]
    return "\n".join([*parts, *_versions(record.values())])


def _work(work: dict[str, Any]) -> list[str]:
    busy = max(work["others_cpus"])
    rounds = len(work["rows"][0]["seconds"])
    columns = {
        "library": [_title(row["peer"]) for row in work["rows"]],
        "seconds a round": [_seconds(row["median_seconds"]) for row in work["rows"]],
        **(_on_gpu if work["environment"]["device"].startswith("cuda") else _on_cpu)(work["rows"]),
        "steps": [f"{row['steps_a_round']:,}" for row in work["rows"]],
        "training loss": [_losses(row) for row in work["rows"]],
    }
    lines = [
        f"**{work['about']}**, {work['threads']} threads, medians of {rounds} rounds; other "
        f"processes kept at most {busy:.1f} cores busy",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(f"| {' | '.join(cells)} |" for cells in zip(*columns.values(), strict=True)),
    ]
    failed = [f"{_title(peer)}: {why}" for peer, why in work["failed"].items()]
    if failed:
        lines += ["", f"Did not run: {'; '.join(failed)}."]
    return [*lines, "", f"{machine(work['environment'])}", ""]


def memory(name: str) -> str:
    """What does not depend on whether the machine was quiet."""
    (work,) = result(name).values()
    lines = [
        f"**{work['about']}**, {work['threads']} threads, {1 + len(work['rows'][0]['seconds'])} "
        "rounds",
        "",
        "| library | memory, MiB | training loss |",
        "|---|---|---|",
        *(
            f"| {_title(row['peer'])} | {row['peak_memory_mib']:,} | {_losses(row)} |"
            for row in work["rows"]
        ),
        "",
        f"One model has {work['parameters']:,} parameters, {_model_mib(work):.1f} MiB; "
        f"{work['work']['clients_per_round']} of them are "
        f"{work['work']['clients_per_round'] * _model_mib(work):.0f} MiB.",
    ]
    return "\n".join([*lines, machine(work["environment"])])


def _model_mib(work: dict[str, Any]) -> float:
    return float(4 * work["parameters"] / 2**20)


def _on_cpu(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {
        "times": [f"{row['times_first']:.2f}" for row in rows],
        "CPU-seconds": [_seconds(row["median_cpu_seconds"]) for row in rows],
        "memory, MiB": [f"{row['peak_memory_mib']:,}" for row in rows],
    }


def _on_gpu(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    perfed = {_precision(row): row for row in rows if row["peer"].startswith("perfed")}
    return {
        "times perfed, same precision": [_times(row, perfed.get(_precision(row))) for row in rows],
        "times perfed, bf16": [_times(row, perfed.get("bf16")) for row in rows],
        "GPU memory, MiB": [f"{row['device_peak_mib']:,}" for row in rows],
    }


def _precision(row: dict[str, Any]) -> str:
    return next((word for word in PRECISIONS if word in row["peer"]), "float32")


def _times(row: dict[str, Any], other: dict[str, Any] | None) -> str:
    """By neighbouring rounds."""
    if other is None:
        return ""
    pairs = zip(row["seconds"], other["seconds"], strict=True)
    return f"{statistics.median(a / b for a, b in pairs):.2f}"


def _losses(row: dict[str, Any]) -> str:
    losses = ", ".join(
        f"{kind} {found['train_loss']:.3f}" for kind, found in sorted(row["learned"].items())
    )
    return losses if row["learned_alike"] else f"{losses} (not alike)"


def _versions(works: Iterable[dict[str, Any]]) -> list[str]:
    """Of every peer once: what ran, and what was stood in for."""
    lines = ["| | commit | packages | stood in for |", "|---|---|---|---|"]
    seen = set()
    for row in (row for work in works for row in work["rows"]):
        name = row["peer"].partition("@")[0].partition("/")[0]
        if name in seen or name == "perfed":
            continue
        seen.add(name)
        commit = f"{row['commit'][:7]}, {row['commit'][-10:]}" if row["commit"] else "from pip"
        packages = ", ".join(f"{n} {v}" for n, v in row["packages"].items() if v)
        stood_in = "; ".join(row["stood_in"])
        lines.append(f"| {NAMES[name]} | {commit} | {packages} | {stood_in} |")
    return lines


def _title(label: str) -> str:
    name, _, variant = label.partition("/")
    return f"{NAMES[name]}, {variant}" if variant else NAMES[name]


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value >= 1 else f"{value:.4f}"


BLOCKS = {
    "peers-cpu": lambda: peers("peers_cpu"),
    "peers-memory": lambda: memory("peers_memory"),
    "peers-h200": lambda: peers("peers_h200"),
}
