"""perfed and its peers on the same work, taking turns round by round.

    python benchmarks/peers.py --peer perfed=src --peer pfllib=/path/to/PFLlib \\
        --peer fedjax=/path/to/fedjax:/path/to/venv/bin/python --work fedavg --work mlp

A peer is NAME[/VARIANT][@LABEL]=SOURCE[:PYTHON]: an adapter ``benchmarks/peers/drive_NAME.py``,
what it is told (perfed: an engine, a precision or both, ``perfed/stacked-bf16``), a label where two
would have the same name, the folder of its source, and the Python that has what it needs. Nothing
of theirs is in this repository. The first peer is the one that the others are compared with.

Every peer is a process of its own and waits while another has its turn. All have the same arrays,
start from the same weights, take the same number of steps with as many threads; at the end the
loss of what they learned is compared, so that nobody is fast by doing less. A round is everything
from the selection of clients to the new global model, without evaluation. Results are put in
``benchmarks/results/peers_<device>.json``, work by work.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
ADAPTERS = HERE / "peers"
WORKER = ADAPTERS / "worker.py"
sys.path.insert(0, str(ADAPTERS))

from processes import PeakMemory, machine_busy_seconds, peak_bytes  # noqa: E402
from work import Work  # noqa: E402
from works import WORKLOADS, prepare  # noqa: E402

from perfed.runs.directory import environment  # noqa: E402

MIB = 2**20
MOST_EVALUATED = 100  # clients whose samples show what was learned
ALIKE = 0.1  # by how much training losses may differ, as a share of the first peer's


class PeerError(Exception):
    """What a peer said when it could not go on."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """One peer as it was asked for."""

    label: str
    source: str
    python: str

    @classmethod
    def parse(cls, text: str) -> Spec:
        label, equals, place = text.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=SOURCE or NAME=SOURCE:PYTHON")
        source, _, python = place.partition(":")
        return cls(label, str(Path(source).absolute()) if source else "", python or sys.executable)

    @property
    def adapter(self) -> str:
        return self.label.partition("@")[0].partition("/")[0]

    @property
    def variant(self) -> str:
        return self.label.partition("@")[0].partition("/")[2]

    def commit(self) -> str | None:
        """Of its source, where that is a git checkout."""
        found = subprocess.run(
            ["git", "-C", self.source or "/", "log", "-1", "--format=%H %cs"],  # noqa: S607
            capture_output=True,
            text=True,
        )
        return found.stdout.strip() or None


class Worker:
    """A peer's process."""

    def __init__(self, spec: Spec, folder: Path, work: Work, log: Path) -> None:
        self.spec = spec
        own = folder / spec.label.replace("/", "-")
        own.mkdir()
        threads = str(work.threads)
        places = [spec.source, str(ADAPTERS), str(HERE.parent / "src")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        environment["RAY_ADDRESS"] = "local"  # its own, also where another cluster runs
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [spec.python, WORKER, spec.adapter, spec.variant, spec.source, str(folder)],
                env=environment,
                cwd=own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.pid = self._process.pid
        if work.device == "cpu":
            os.sched_setaffinity(self.pid, sorted(os.sched_getaffinity(0))[: work.threads])

    def ask(self, word: str = "") -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if word:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                answer = json.loads(line[1:])
                if "error" in answer:
                    raise PeerError(answer["error"])
                return answer
        raise PeerError(f"the process ended (exit {self._process.wait()})")

    def stop(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """While others that use the same lock wait."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Turns:
    """One work, done by all peers in turns."""

    def __init__(
        self, name: str, specs: list[Spec], device: str, threads: int, logs: Path, lock: Path
    ) -> None:
        self.name, self.specs, self.logs, self.lock = name, specs, logs, lock
        self.device, self.threads = device, threads
        self.rows: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.workers: dict[str, Worker] = {}

    def run(self, rounds: int) -> dict[str, Any]:
        workload = WORKLOADS[self.name]
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            networks = prepare(workload, folder, self.device, self.threads)
            work = Work.read(folder)
            try:
                for spec in self.specs:
                    self._guarded(spec.label, partial(self._start, spec, folder, work))
                self._take_turns(rounds)
                for label in list(self.workers):
                    ended = partial(self._finish, label, folder, work, networks)
                    self._guarded(label, ended)
            finally:
                for worker in self.workers.values():
                    worker.stop()
        self._compare()
        return {
            "about": workload.about,
            "work": dataclasses.asdict(workload),
            "parameters": sum(parameter.numel() for parameter in networks[0].parameters()),
            "threads": self.threads,
            "environment": environment(torch.device(self.device)),
            "load_before": load,
            "rows": list(self.rows.values()),
            "failed": self.failed,
        }

    def _guarded(self, label: str, action: Callable[[], None]) -> None:
        """What a peer cannot do is recorded, and the others go on."""
        try:
            action()
        except (PeerError, OSError) as error:
            print(f"{self.name}: {label} failed: {error}", file=sys.stderr)
            self.failed[label] = str(error)
            self.rows.pop(label, None)
            if worker := self.workers.pop(label, None):
                worker.stop()

    def _start(self, spec: Spec, folder: Path, work: Work) -> None:
        log = self.logs / f"{self.name}-{spec.label.replace('/', '-')}.log"
        self.workers[spec.label] = worker = Worker(spec, folder, work, log)
        facts = worker.ask()
        with PeakMemory(worker.pid) as memory:
            first = worker.ask("first round")
        self.rows[spec.label] = {
            "peer": spec.label,
            "commit": spec.commit(),
            **facts,
            "first_round_seconds": round(first["seconds"], 3),
            "steps_a_round": first["steps"],
            "peak_memory_mib": round(memory.bytes / MIB),
            "seconds": [],
            "cpu_seconds": [],
            "others_cpus": [],  # how many cores all other processes kept busy meanwhile
        }

    def _take_turns(self, rounds: int) -> None:
        for turn in range(rounds):
            labels = list(self.workers)
            if turn % 2:
                labels.reverse()
            with alone(self.lock):
                for label in labels:
                    self._guarded(label, partial(self._turn, label))

    def _turn(self, label: str) -> None:
        busy = machine_busy_seconds()
        said = self.workers[label].ask("round")
        others = machine_busy_seconds() - busy - said["cpu_seconds"]
        row = self.rows[label]
        row["seconds"].append(round(said["seconds"], 5))
        row["cpu_seconds"].append(round(said["cpu_seconds"], 5))
        row["others_cpus"].append(round(max(0.0, others) / said["seconds"], 2))

    def _finish(
        self, label: str, folder: Path, work: Work, networks: list[torch.nn.Module]
    ) -> None:
        worker, row = self.workers[label], self.rows[label]
        row["peak_memory_mib"] = max(row["peak_memory_mib"], round(peak_bytes(worker.pid) / MIB))
        where = folder / f"models-{label.replace('/', '-')}"
        counts = worker.ask(f"models {where}")
        row["learned"] = {
            kind: learned(work, networks, where, kind, count) for kind, count in counts.items()
        }
        device = worker.ask("memory")["device_peak_bytes"]
        row["device_peak_mib"] = None if device is None else round(device / MIB)

    def _compare(self) -> None:
        """Medians, and ratios to the first peer by neighbouring rounds."""
        first = next(iter(self.rows.values()), None)
        for row in self.rows.values():
            for kind in ("seconds", "cpu_seconds", "others_cpus"):
                row[f"median_{kind}"] = statistics.median(row[kind])
            pairs = zip(row["seconds"], first["seconds"], strict=True)
            row["times_first"] = round(statistics.median(a / b for a, b in pairs), 3)
            row["learned_alike"] = alike(row["learned"], first["learned"])


def learned(
    work: Work, networks: list[torch.nn.Module], folder: Path, kind: str, count: int
) -> dict[str, float]:
    """Mean loss and accuracy over clients, on their training and test samples."""
    found: dict[str, list[float]] = {}
    for client in range(min(work.clients, MOST_EVALUATED)):
        state = np.load(folder / f"{kind}_{client if count > 1 else 0}.npz")
        network = networks[client]
        network.load_state_dict({name: torch.from_numpy(state[name]) for name in state.files})
        for part, (x, y) in (("train", work.train[client]), ("test", work.test[client])):
            labels = torch.from_numpy(y).long()
            with torch.no_grad():
                logits = network.eval()(torch.from_numpy(x))
            loss = float(torch.nn.functional.cross_entropy(logits, labels))
            accuracy = float((logits.argmax(1) == labels).float().mean())
            found.setdefault(f"{part}_loss", []).append(loss)
            found.setdefault(f"{part}_accuracy", []).append(accuracy)
    return {name: round(statistics.fmean(values), 4) for name, values in found.items()}


def alike(learned: dict[str, Any], first: dict[str, Any]) -> bool:
    kinds = learned.keys() & first.keys()
    return bool(kinds) and all(
        abs(learned[kind]["train_loss"] - first[kind]["train_loss"])
        <= ALIKE * first[kind]["train_loss"]
        for kind in kinds
    )


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['about']}; load before {result['load_before']:.1f}",
        f"{'peer':<24}{'s a round':>10}{'times':>7}{'CPU s':>9}{'MiB':>7}{'steps':>7}"
        f"{'others':>8}  train loss",
    ]
    for row in result["rows"]:
        losses = {kind: found["train_loss"] for kind, found in row["learned"].items()}
        lines.append(
            f"{row['peer']:<24}{row['median_seconds']:>10.4f}{row['times_first']:>6.2f}×"
            f"{row['median_cpu_seconds']:>9.4f}{row['peak_memory_mib']:>7}"
            f"{row['steps_a_round']:>7}{row['median_others_cpus']:>8.2f}  {losses}"
            + ("" if row["learned_alike"] else " NOT ALIKE")
        )
    lines += [f"{label:<24}failed: {reason}" for label, reason in result["failed"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Spec.parse, action="append", required=True)
    parser.add_argument("--work", choices=list(WORKLOADS), action="append", required=True)
    parser.add_argument("--rounds", type=int, default=5, help="that are timed, of each peer")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="the record; '-': only print")
    parser.add_argument("--logs", type=Path, help="where to keep what peers print")
    parser.add_argument(
        "--lock", type=Path, help="a file that is locked (flock) for each turn of all peers"
    )
    asked = parser.parse_args()
    kind = "cpu" if asked.device == "cpu" else "cuda"
    out = asked.out or HERE / "results" / f"peers_{kind}.json"
    with tempfile.TemporaryDirectory() as temporary:
        logs = asked.logs or Path(temporary)
        logs.mkdir(exist_ok=True, parents=True)
        for name in asked.work:
            lock = asked.lock or logs / "lock"
            turns = Turns(name, asked.peer, asked.device, asked.threads, logs, lock)
            result = turns.run(asked.rounds)
            print(table(result), end="\n\n", flush=True)
            if str(out) != "-":
                record = json.loads(out.read_text()) if out.is_file() else {}
                out.write_text(json.dumps(record | {name: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
