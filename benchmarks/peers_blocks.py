"""The tables of ``benchmarks/peers.py``."""

from __future__ import annotations

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


def peers(name: str) -> str:
    if not (ROOT / "benchmarks" / "results" / f"{name}.json").is_file():
        return "No record yet: it needs a machine on which nothing else runs."
    record = result(name)
    parts = [part for work in record.values() for part in _work(work)]
    return "\n".join([*parts, *_versions(record.values())])


def _work(work: dict[str, Any]) -> list[str]:
    busy = max(work["others_cpus"])
    rounds = len(work["rows"][0]["seconds"])
    lines = [
        f"**{work['about']}**, {work['threads']} threads, medians of {rounds} rounds; other "
        f"processes kept at most {busy:.1f} cores busy",
        "",
        "| | seconds a round | times | CPU-seconds | memory, MiB | steps | training loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in work["rows"]:
        losses = ", ".join(
            f"{kind} {found['train_loss']:.3f}" for kind, found in sorted(row["learned"].items())
        )
        lines.append(
            f"| {_title(row['peer'])} | {_seconds(row['median_seconds'])} | "
            f"{row['times_first']:.2f} | {_seconds(row['median_cpu_seconds'])} | "
            f"{row['peak_memory_mib']:,} | {row['steps_a_round']:,} | {losses}"
            f"{'' if row['learned_alike'] else ' (not alike)'} |"
        )
    failed = [f"{_title(peer)}: {why}" for peer, why in work["failed"].items()]
    if failed:
        lines += ["", f"Did not run: {'; '.join(failed)}."]
    return [*lines, "", f"{machine(work['environment'])}", ""]


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


BLOCKS = {"peers-cpu": lambda: peers("peers_cpu")}
