"""Fuzz, and record what came of it: ``python -m tests.fuzz`` (see ``make fuzz``).

Each target has a process of its own. With atheris it is guided by coverage, and ends where an input
takes more than ``SECONDS`` or ``MEGABYTES``; an input that is a fault is kept in build/fuzz.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "build" / "fuzz"
RESULT = ROOT / "benchmarks" / "results" / "fuzz.json"
SECONDS, MEGABYTES = 20, 3000  # for one input; PyTorch alone takes 300

SHARES = {  # of the mutations: what is slow to read gets fewer
    "tensor-files": 0.25,
    "messages": 0.15,
    "codes": 0.1,
    "envelopes": 0.15,
    "handouts": 0.05,
    "arrays": 0.1,
    "archives": 0.1,
    "configurations": 0.05,
    "run-directories": 0.05,
}


class _Targets(Mapping[str, Any]):
    """The classes by name, imported when they are asked for: atheris must be there first."""

    def __getitem__(self, name: str) -> Any:
        module = importlib.import_module(f"tests.fuzz.{name.replace('-', '_')}")
        return getattr(module, name.title().replace("-", ""))

    def __iter__(self) -> Iterator[str]:
        return iter(SHARES)

    def __len__(self) -> int:
        return len(SHARES)


TARGETS = _Targets()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(SHARES)}; default: all")
    parser.add_argument("--mutations", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := set(chosen.targets) - set(SHARES):
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    if chosen.inside:
        fuzz(chosen.targets[0], chosen.mutations, chosen.seed)
        return
    names = chosen.targets or list(SHARES)
    shares = {name: SHARES[name] / sum(SHARES[n] for n in names) for name in names}
    rows = [apart(n, round(shares[n] * chosen.mutations), chosen.seed) for n in names]
    if chosen.record:
        record(rows, chosen.seed)
    print(
        f"{sum(r['mutations'] for r in rows):,} mutations, {sum(r['faults'] for r in rows)} faults"
    )
    sys.exit(any(row["faults"] for row in rows))


def apart(name: str, mutations: int, seed: int) -> dict[str, Any]:
    """In a process of its own: what came of it."""
    FOUND.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz", name, "--inside", "--seed", str(seed)]
    command += ["--mutations", str(mutations)]
    with open(FOUND / f"{name}.log", "w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log)
    row = {"target": name, "mutations": mutations, "accepted": 0, "guided_by": guide()}
    with contextlib.suppress(FileNotFoundError, ValueError):
        row |= json.loads((FOUND / f"{name}.json").read_text())
    row |= {"seconds": round(time.monotonic() - began), "faults": int(done.returncode != 0)}
    print(row, flush=True)
    if row["faults"]:
        print(f"a fault: the end of {FOUND.relative_to(ROOT)}/{name}.log says which", flush=True)
    return row


def guide() -> str:
    return "atheris" if importlib.util.find_spec("atheris") else "hypothesis"


def fuzz(name: str, mutations: int, seed: int) -> None:
    """In this process, which ends with it."""
    with tempfile.TemporaryDirectory() as folder:
        drive = with_atheris if guide() == "atheris" else with_hypothesis
        drive(name, Path(folder), mutations, seed)


class Counted:
    """A target, and how many inputs it was given and accepted."""

    def __init__(self, name: str, folder: Path) -> None:
        self.target = TARGETS[name](folder)
        self.name, self.mutations, self.accepted = name, 0, 0

    def __call__(self, data: bytes) -> bool:
        self.mutations += 1
        try:
            accepted: bool = self.target.accepts(data)
        except BaseException:
            (FOUND / f"{self.name}.fault").write_bytes(data)
            self.write()
            raise
        self.accepted += accepted
        return accepted

    def write(self) -> None:
        counts = {"mutations": self.mutations, "accepted": self.accepted}
        (FOUND / f"{self.name}.json").write_text(json.dumps(counts))


def with_atheris(name: str, folder: Path, mutations: int, seed: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["perfed"]):
        counted = Counted(name, folder)
    from tests.fuzz.mutation import edited, random_edits

    tokens = counted.target.tokens
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, content in enumerate(counted.target.seeds()):
        (corpus / f"{number:02}").write_bytes(content)

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < 0.2:
            return bytes(atheris.Mutate(data, most))
        return edited(data, random_edits(draw), tokens)[:most]

    def one(data: bytes) -> None:
        counted(data)
        if counted.mutations >= mutations:  # libFuzzer ends the process where it ends
            counted.write()

    arguments = [f"-runs={mutations}", f"-seed={seed}", f"-timeout={SECONDS}", "-max_len=65536"]
    arguments.append("-mutate_depth=1")  # nearly valid inputs reach further than noise
    arguments += [f"-rss_limit_mb={MEGABYTES}", f"-artifact_prefix={FOUND}/{name}-"]
    atheris.Setup([name, *arguments, str(corpus)], one, custom_mutator=mutated)
    atheris.Fuzz()


def with_hypothesis(name: str, folder: Path, mutations: int, seed: int) -> None:
    import faulthandler

    import hypothesis
    from hypothesis import strategies as st

    from tests.fuzz.mutation import KINDS, Edit, edited

    counted = Counted(name, folder)
    numbers = st.integers(0, 2**32)
    edits = st.lists(st.builds(Edit, st.sampled_from(KINDS), numbers, numbers, numbers), max_size=5)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=mutations,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.sampled_from(counted.target.seeds()), edits)
    def one(data: bytes, changes: list[Edit]) -> None:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        accepted = counted(edited(data, changes, counted.target.tokens))
        hypothesis.target(accepted * len(changes), label="changes that are accepted")

    one()
    faulthandler.cancel_dump_traceback_later()
    counted.write()


def record(rows: list[dict[str, Any]], seed: int) -> None:
    import torch

    from perfed.runs.directory import environment

    result = {"environment": environment(torch.device("cpu")), "seed": seed, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
