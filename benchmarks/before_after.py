"""Did a change make the engines slower? ``perfed bench`` of two source trees, in turns.

    python benchmarks/before_after.py OLD/src NEW/src [cpu|cuda] [pairs] [turns]

A machine's speed drifts, and other processes disturb it. So both trees run at the same time, one
of them waiting: whatever ``perfed bench`` times is timed once by the one, then once by the other,
so many turns. A process also keeps where its memory happens to lie, which makes some per cent. So
there are several pairs of processes. What counts is the median over pairs of the median ratio of
neighbours. Ray is left out: its workers run the stacked engine. Writes
``benchmarks/results/before_after_<device>.json``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Seconds = dict[str, list[float]]  # of both trees


class Tree:
    """A process that runs ``perfed bench`` of one tree, and waits wherever it measures."""

    def __init__(self, source: str, device: str) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(source).absolute())}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--worker", device],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, word: str = "") -> Any:
        """Its answer: seconds for "once", then what it says when it waits again or has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if word:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit("a tree's bench ended early")


def worker(device: str) -> None:
    from perfed import bench

    def tell(value: Any) -> None:
        print("@" + json.dumps(value), flush=True)

    def timed(work: Callable[[], None], device: Any, repeats: int = 0) -> tuple[float, float]:
        def once() -> float:
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                bench.torch.cuda.synchronize(device)
            return time.perf_counter() - began

        first, found = once(), []
        tell("waiting")
        while sys.stdin.readline().strip() == "once":
            found.append(once())
            tell(found[-1])
        return first, statistics.median(found)

    bench.timed, bench.has_ray = timed, lambda: False
    tell(bench.bench(device))


def pair(sources: dict[str, str], device: str, turns: int) -> tuple[Any, dict[str, Seconds]]:
    """The new tree's result, and the seconds of both for whatever was timed."""
    trees = {name: Tree(source, device) for name, source in sources.items()}
    said = {name: tree.ask() for name, tree in trees.items()}
    found: list[Seconds] = []
    while said["after"] == "waiting":
        seconds: Seconds = {name: [] for name in trees}
        for turn in range(turns):
            for name in sorted(trees, reverse=turn % 2 == 0):  # which is first changes
                seconds[name].append(trees[name].ask("once"))
        found.append(seconds)
        said = {name: tree.ask("next") for name, tree in trees.items()}
    result = said["after"]
    kinds = [
        f"{row['engine']} {row['precision']} {kind}"
        for row in result["rows"]
        for kind in ("step_ms", "round_ms")
        if kind in row
    ]
    return result, dict(zip(kinds, found, strict=False))  # the last is the machine's peak


def main(old: str, new: str, device: str = "cpu", pairs: str = "7", turns: str = "12") -> None:
    rows: dict[str, list[Seconds]] = {}
    sources = {"before": old, "after": new}
    for _ in range(int(pairs)):
        result, found = pair(sources, device, int(turns))
        sources = dict(reversed(sources.items()))  # which process is started first changes too
        for kind, seconds in found.items():
            rows.setdefault(kind, []).append(seconds)
            ratios = sorted(map(_ratio, rows[kind]))
            print(f"{kind:<32} {statistics.median(ratios):.3f} of {[f'{r:.3f}' for r in ratios]}")
    path = RESULTS / f"before_after_{device}.json"
    content = {
        "about": f"{pairs} pairs of processes, {turns} turns each; seconds",
        "environment": result["environment"],
        "work": result["work"]["name"],
        "rows": rows,
        "ratios": {kind: statistics.median(map(_ratio, pairs)) for kind, pairs in rows.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _ratio(seconds: Seconds) -> float:
    """After by before, the median of neighbours."""
    pairs = zip(seconds["before"], seconds["after"], strict=True)
    return statistics.median(after / before for before, after in pairs)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(sys.argv[2])
    else:
        main(*sys.argv[1:])
