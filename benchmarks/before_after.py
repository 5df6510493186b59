"""Did a change make the engines slower? ``perfed bench`` of two source trees, in turns.

    python benchmarks/before_after.py OLD/src NEW/src [cpu|cuda] [repeats]

A machine's speed drifts, so the two take turns, each in a process of its own, and what counts is
the ratio of neighbours. Writes ``benchmarks/results/before_after_<device>.json``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
BENCH = "import json, sys; from perfed.bench import bench; print(json.dumps(bench(sys.argv[1])))"
TIMES = ("step_ms", "round_ms")


def once(source: str, device: str) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(Path(source).absolute())}
    done = subprocess.run(
        [sys.executable, "-c", BENCH, device],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(old: str, new: str, device: str = "cpu", repeats: str = "5") -> None:
    rows: dict[str, dict[str, list[float]]] = {}
    for _ in range(int(repeats)):
        for name, source in (("before", old), ("after", new)):
            result = once(source, device)
            for row in result["rows"]:
                for time in TIMES:
                    if time in row:
                        key = f"{row['engine']} {row['precision']} {time}"
                        rows.setdefault(key, {}).setdefault(name, []).append(row[time])
        for key, found in rows.items():
            ratios = [b / a for a, b in zip(found["before"], found["after"], strict=True)]
            print(f"{key:<32} after/before: {statistics.median(ratios):.3f} of {len(ratios)}")
    path = RESULTS / f"before_after_{device}.json"
    content = {"environment": result["environment"], "work": result["work"]["name"], "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
