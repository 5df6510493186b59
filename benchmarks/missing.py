"""What has not been run yet, in the order in which it is wanted; and running it.

    python benchmarks/missing.py                      what is there
    python benchmarks/missing.py run --seconds 1500   runs what is not, on a GPU

For whoever has a GPU for half an hour: after --seconds no run is begun. Each part is a command of
its own, which keeps a record of every run as it ends, and goes on with what is missing when it is
given again. ``--only 2,5`` takes these parts, ``--dry`` says what would be run. CIFAR-10 and
CIFAR-100 have to be stored first: ``perfed data get cifar10``, and ``cifar100``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import bytes as bytes_bench
import readings
from committed import RESULTS, ROOT
from paper_blocks import PARTS

from perfed.config import STUDIES, read_mapping
from perfed.core import layout
from perfed.core.layout import Table
from perfed.runs.design import Conduct, design
from perfed.runs.study import Study

PERFED = (sys.executable, "-m", "perfed")
GPU = ("--device", "cuda", "--precision", "bf16")
BENCHES = ("bench-htfe4-cifar100", "bench-mixed-cifar10")


class Work(NamedTuple):
    """Some runs that answer one question."""

    name: str
    page: str
    """Where the documentation shows them."""
    command: Sequence[str]
    count: Callable[[], tuple[int, int]]
    """How many runs there are, and how many are wanted."""
    seconds: Callable[[float], Sequence[str]] = lambda left: ("--seconds", f"{left:.0f}")
    """How the command is told when to begin nothing more."""


def of_study(study: Study) -> tuple[int, int]:
    wanted = len(study.experiments)
    return wanted - len(study.missing()), wanted


def looked_at_after() -> tuple[int, int]:
    there = sum(map(len, readings.found_after().values()))
    return there, len(readings.METHODS) * len(readings.SEEDS)


def of_family(family: str) -> tuple[int, int]:
    import kin  # registers methods, so it is not imported by who asks for something else

    return of_study(Study(RESULTS / f"kin-{family}", kin.cells(family)))


def of_bytes() -> tuple[int, int]:
    path = RESULTS / "bytes_cifar.json"
    there = json.loads(path.read_text("utf-8"))["rows"] if path.is_file() else []
    return len(there), len(bytes_bench.wanted("cifar"))


def of_bench(name: str) -> tuple[int, int]:
    """Results, without the trials before them and what does not fit."""
    conduct = Conduct(design(read_mapping(name, STUDIES)), RESULTS / "studies" / name)
    found = [one for one in conduct.everything() if not one.left_out]
    return sum(len(one.records) for one in found), sum(len(one.cell.design.seeds) for one in found)


def everything() -> list[Work]:
    """The most wanted first."""

    def script(name: str, *rest: str) -> tuple[str, ...]:
        return (sys.executable, str(ROOT / "benchmarks" / name), *rest)

    def of_kin(family: str) -> Work:
        command = script("kin.py", "run", family, "device=cuda", f"out={RESULTS}")
        return Work(
            f"PerFed-Kin, {family}",
            "successor",
            command,
            lambda: of_family(family),
            lambda left: (f"seconds={left:.0f}",),
        )

    def bench(name: str) -> Work:
        out = ("--out", str(RESULTS / "studies" / name))
        command = (*PERFED, "study", name, "--side-by-side", *GPU, *out)
        return Work(f"study {name}", "benchmark", command, lambda: of_bench(name))

    tables = [
        Work(
            part.name,
            "reproduction",
            (*PERFED, *part.arguments, "--side-by-side", *GPU[2:]),
            lambda part=part: of_study(part.study()),
        )
        for part in PARTS
    ]
    paper = Work(
        "Readings of the paper",
        "reproduction",
        script("readings.py", *GPU[2:]),
        lambda: of_study(readings.study()),
    )
    after = Work(
        "Readings of the paper, when a run is over",
        "reproduction",
        script("readings.py", "--after", *GPU[2:]),
        looked_at_after,
    )
    return [
        *tables[:2],
        paper,
        after,
        of_kin("cifar"),
        *tables[2:],
        of_kin("cifar-three"),
        Work("Bytes, CIFAR-10", "bytes", script("bytes.py", "cifar", *GPU), of_bytes),
        *map(bench, BENCHES),
    ]


def shown(works: Sequence[Work]) -> Table:
    rows = []
    for number, work in enumerate(works, 1):
        there, wanted = work.count()
        rows.append((str(number), work.name, f"docs/{work.page}.md", f"{there} of {wanted}"))
    return Table("", ("", "runs", "page", "there"), rows, names=3)


def run(works: Sequence[Work], seconds: float, dry: bool) -> int:
    """One after another, each with the time that is left; the worst exit status."""
    ends, status = time.monotonic() + seconds, 0
    for work in works:
        there, wanted = work.count()
        left = ends - time.monotonic()
        if there == wanted or left <= 0:
            continue
        command = [*work.command, *(work.seconds(left) if left < float("inf") else ())]
        print(f"{work.name}: {wanted - there} runs are missing\n  {' '.join(command)}", flush=True)
        if not dry:
            status = max(status, subprocess.run(command, check=False).returncode)
    return status


def chosen(works: Sequence[Work], numbers: Collection[int]) -> list[Work]:
    return [work for number, work in enumerate(works, 1) if not numbers or number in numbers]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["list", "run"], default="list")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", default="", help="numbers of the list: 2,5")
    parser.add_argument("--dry", action="store_true", help="say what would be run")
    given = parser.parse_args()
    works = everything()
    if given.what == "list":
        print(layout.text([shown(works)]))
        return
    only = {int(number) for number in given.only.split(",") if number}
    sys.exit(run(chosen(works, only), given.seconds, given.dry))


if __name__ == "__main__":
    main()
