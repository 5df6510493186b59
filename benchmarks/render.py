"""Put the committed results into the documentation, so that no number there is typed.

python benchmarks/render.py           rewrites the blocks between <!-- begin: X --> and end
python benchmarks/render.py --check   exits with 1 where a block is not what the results say
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

from perfed.paper.costs import render as render_costs
from perfed.report.tables import spread, summary_table

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/findings.md")


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))


def comparison(name: str) -> str:
    record = result(name)
    lines = [summary_table(record["runs"]), *record["failures"]]
    return "\n".join(["```", *lines, "```", machine(record["environment"])])


def machine(environment: dict[str, Any]) -> str:
    packages = environment["packages"]
    return (
        f"({environment['device']}, torch {packages['torch']}, numpy {packages['numpy']}, "
        f"Python {environment['python']}, {environment['started'][:10]})"
    )


def batchnorm() -> str:
    lines = ["| data | setting | separate | private | shared |", "|---|---|---|---|---|"]
    notes = []
    for name, title in (("digits", "digits, CNN"), ("cifar10", "CIFAR-10 / 100, VGG11")):
        record = result(f"public_batchnorm_{name}")
        cells: dict[str, dict[str, str]] = {}
        for row in record["rows"]:
            values = row["validation_accuracy"]
            cells.setdefault(row["setting"], {})[row["mode"]] = spread(values)
        for setting, by_mode in cells.items():
            best = max(by_mode, key=lambda mode: float(by_mode[mode].split()[0]))
            by_mode[best] = f"**{by_mode[best]}**"
            shown = " | ".join(by_mode[mode] for mode in ("separate", "private", "shared"))
            lines.append(f"| {title} | {setting} | {shown} |")
        seeds = sorted({seed for row in record["rows"] for seed in row["seeds"]})
        source = f"{record['data']}; " if "data" in record else ""
        notes.append(f"{title}: {source}seeds {seeds} {machine(record['environment'])}.")
    return "\n".join([*lines, "", *notes])


def tuning() -> str:
    """Validation accuracy by step size, and how many seeds diverged."""
    rates = ("0.1", "0.2")
    cells: dict[str, dict[str, str]] = {}
    for rate in rates:
        record = result(f"tuning_{rate}")
        values: dict[str, list[float]] = {}
        for run in record["runs"]:
            last = next(iter(run["models"].values()))["last"]
            values.setdefault(run["algorithm"], []).append(last["validation_accuracy"])
        for algorithm, found in values.items():
            cells.setdefault(algorithm, {})[rate] = spread(found)
        for failure in record["failures"]:
            algorithm = failure.partition(", seed")[0]
            row = cells.setdefault(algorithm, {})
            lost = sum(other.startswith(f"{algorithm}, seed") for other in record["failures"])
            row[rate] = f"{lost} of {lost + len(values.get(algorithm, []))} seeds diverged"
    lines = [f"| | {' | '.join(f'η = {rate}' for rate in rates)} |", "|---|---|---|"]
    for algorithm, row in cells.items():
        lines.append(f"| {algorithm} | {' | '.join(row[rate] for rate in rates)} |")
    return "\n".join(lines)


def against_local(name: str) -> str:
    """Points above local training, seed by seed, for all clients and by training-set size."""
    accuracy: dict[str, dict[int, dict[str, float]]] = {}
    for run in result(name)["runs"]:
        last = next(iter(run["models"].values()))["last"]  # the model a client would use
        groups = {"all": last["test_accuracy"]} | last["test_accuracy_by_train_size"]
        accuracy.setdefault(run["algorithm"], {})[run["seed"]] = groups
    sizes = sorted(
        {g for runs in accuracy.values() for row in runs.values() for g in row}, key=size_order
    )
    head = " | ".join("all clients" if size == "all" else f"{size} samples" for size in sizes)
    lines = [f"| | {head} |", "|---" * (len(sizes) + 1) + "|"]
    for algorithm, runs in accuracy.items():
        if algorithm in ("local", "majority"):
            continue
        cells = []
        for size in sizes:
            gains = [
                100 * (row[size] - accuracy["local"][seed][size])
                for seed, row in runs.items()
                if size in row
            ]
            deviation = f" ± {statistics.stdev(gains):.1f}" if len(gains) > 1 else ""
            cells.append(f"{statistics.mean(gains):+.1f}{deviation}")
        lines.append(f"| {algorithm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def size_order(group: str) -> int:
    """All clients first, then by size: "1-9", "10-99", "1000+"."""
    return 0 if group == "all" else int(re.split("[-+]", group)[0])


BLOCKS = {
    "digits-groups": lambda: comparison("digits-groups"),
    "all-algorithms": lambda: comparison("all_algorithms"),
    "digits-dirichlet": lambda: comparison("digits-dirichlet"),
    "digits-dirichlet-gains": lambda: against_local("digits-dirichlet"),
    "digits-groups-gains": lambda: against_local("all_algorithms"),
    "batchnorm": batchnorm,
    "tuning": tuning,
    "costs": lambda: "\n".join(["```", render_costs(result("costs")), "```"]),
}


def rendered(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        return f"{match[1]}\n{BLOCKS[match[2]]()}\n{match[3]}"

    pattern = r"(<!-- begin: (\S+) -->).*?(<!-- end: \2 -->)"
    return re.sub(pattern, block, text, flags=re.S)


def main() -> None:
    wrong = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text("utf-8")
        new = rendered(text)
        if new != text:
            wrong.append(name)
            if "--check" not in sys.argv:
                path.write_text(new, "utf-8")
    if wrong and "--check" in sys.argv:
        sys.exit(f"not what the results say: {', '.join(wrong)}; run python benchmarks/render.py")


if __name__ == "__main__":
    main()
