"""perfed and its peers on the same work, taking turns round by round.

    python benchmarks/peers.py --peer perfed=src --peer pfllib=/path/to/PFLlib \\
        --peer fedjax=/path/to/fedjax:/path/to/venv/bin/python --work fedavg --work mlp

A peer is NAME[/VARIANT][@LABEL]=SOURCE[:PYTHON]: an adapter ``benchmarks/peers/drive_NAME.py``,
what it is told (perfed: an engine, a precision or both, ``perfed/stacked-bf16``, or ``mapped`` for
samples that stay on disk; others: ``tf32``, or nothing for float32), a label where two would have
the same name, the folder of its source, and the Python that has what it needs. Nothing of theirs is
in this repository. The first peer is the one that the others are compared with.

Every peer is a process of its own and waits while another has its turn. All have the same arrays,
start from the same weights, take the same number of steps with as many threads; at the end the
loss of what they learned is compared, so that nobody is fast by doing less. A round is everything
from the selection of clients to the new global model, without evaluation. Results are put in
``benchmarks/results/peers_<device>.json``, work by work, if the machine was quiet: where other
processes keep the cores busy, threads that wait for each other lose a factor of ten, and one peer
more than another. So turns that were disturbed are taken again. A peer that fails, or does not
answer for longer than ``--patience``, is left out, and the record says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
ADAPTERS = HERE / "peers"
WORKER = ADAPTERS / "worker.py"
sys.path.insert(0, str(ADAPTERS))

from processes import (  # noqa: E402
    PeakMemory,
    family,
    machine_busy_seconds,
    own_cpu_seconds,
    peak_bytes,
)
from work import Work  # noqa: E402
from works import WORKLOADS, prepare  # noqa: E402

from perfed.runs.directory import environment  # noqa: E402

MIB = 2**20
QUIET = 0.3  # cores that other processes may keep busy; threads that wait for each other lose more
STOPPING = 20  # seconds that a peer may take to end
TRIES = 4  # turns for each that is needed
MOST_EVALUATED = 100  # clients whose samples show what was learned
ALIKE = 0.1  # by how much training losses may differ, as a share of the first peer's
SMALL_LOSS = 0.05  # a difference that counts for nothing


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
        """Of its source, where that is a git checkout, or has a file COMMIT instead."""
        said = Path(self.source) / "COMMIT"
        if self.source and said.is_file():
            return said.read_text().strip()
        found = subprocess.run(
            ["git", "-C", self.source or "/", "log", "-1", "--format=%H %cs"],  # noqa: S607
            capture_output=True,
            text=True,
        )
        return found.stdout.strip() or None


class Worker:
    """A peer's process. Where an answer takes longer than ``patience`` seconds, it is ended."""

    def __init__(self, spec: Spec, folder: Path, work: Work, log: Path, patience: float) -> None:
        self.spec, self.patience = spec, patience
        own = folder / spec.label.replace("/", "-")
        own.mkdir()
        threads = str(work.threads)
        places = [spec.source, str(ADAPTERS), str(HERE.parent / "src")]
        places.append(os.environ.get("PYTHONPATH", ""))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
        environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        environment["RAY_ADDRESS"] = "local"  # its own, also where another cluster runs
        environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the GPU is everybody's
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
        late = threading.Event()

        def end() -> None:
            late.set()
            self._kill()

        clock = threading.Timer(self.patience, end)
        clock.start()
        try:
            answer = self._answer(word)
        finally:
            clock.cancel()
        if late.is_set():
            raise PeerError(f"no answer within {self.patience:g} seconds")
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer

    def _answer(self, word: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if word:
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        return {"error": f"the process ended (exit {self._process.wait()})"}

    def stop(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOPPING)
        except subprocess.TimeoutExpired:
            self._kill()
        self._process.stdout.close()

    def _kill(self) -> None:
        """It and what it started."""
        for pid in family(self.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Alone:
    """While it is open, others that use the same lock wait; between turns it lets them in, once it
    has been held for some time."""

    LONGEST = 120  # seconds

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Alone:
        self._file = self.path.open("a")
        self._take()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def between(self) -> None:
        if time.monotonic() - self._since > self.LONGEST:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            time.sleep(1)
            self._take()

    def _take(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._since = time.monotonic()


@dataclasses.dataclass(frozen=True)
class Turn:
    said: dict[str, Any]  # by each peer
    others_cpus: float  # how many cores other processes kept busy meanwhile


class Turns:
    """One work, done by all peers in turns."""

    def __init__(
        self,
        name: str,
        specs: list[Spec],
        device: str,
        threads: int,
        logs: Path,
        lock: Path,
        patience: float,
        together: bool = False,
    ) -> None:
        self.name, self.specs, self.logs, self.lock = name, specs, logs, lock
        self.device, self.threads, self.patience = device, threads, patience
        self.first_at_once = max(1, len(specs)) if together else 1
        self.rows: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, str] = {}
        self.workers: dict[str, Worker] = {}

    def run(self, rounds: int, most: int, seconds: float) -> dict[str, Any]:
        """So many turns count; of at most ``most``, those that were disturbed least. After so many
        seconds no further one begins."""
        workload = WORKLOADS[self.name]
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            networks = prepare(workload, folder, self.device, self.threads)
            work = Work.read(folder)
            try:
                for spec in self.specs:  # all at once: imports take longest
                    self._guarded(spec.label, partial(self._start, spec, folder, work))
                started = [spec for spec in self.specs if spec.label in self.workers]
                with ThreadPoolExecutor(self.first_at_once) as pool:
                    list(pool.map(self._begin, started))
                labels = [spec.label for spec in started if spec.label in self.rows]
                self.rows = {label: self.rows[label] for label in labels}  # in the order asked for
                self._take_turns(rounds, most, seconds)
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
            "others_cpus": self.others_cpus,
            "quiet": max(self.others_cpus) <= QUIET,
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
        self.workers[spec.label] = Worker(spec, folder, work, log, self.patience)

    def _begin(self, spec: Spec) -> None:
        self._guarded(spec.label, partial(self._first_round, spec))

    def _first_round(self, spec: Spec) -> None:
        worker = self.workers[spec.label]
        facts = worker.ask()
        with PeakMemory(worker.pid) as memory:
            first = worker.ask("first round")
        self.rows[spec.label] = {
            "peer": spec.label,
            "commit": spec.commit(),
            **facts,
            "steps_a_round": first["steps"],
            "peak_memory_mib": round(memory.bytes / MIB),
        }

    def _take_turns(self, rounds: int, most: int, seconds: float) -> None:
        """Turns during which nothing else ran, as far as there are; else the quietest."""
        turns: list[Turn] = []
        end = time.monotonic() + seconds
        with Alone(self.lock) as alone:
            while sum(turn.others_cpus <= QUIET for turn in turns) < rounds:
                if len(turns) == most or (turns and time.monotonic() > end):
                    break
                turns.append(self._turn(reverse=len(turns) % 2 == 1))
                alone.between()
        chosen = sorted(turns, key=lambda turn: turn.others_cpus)[:rounds]
        for label, row in self.rows.items():
            for kind in ("seconds", "cpu_seconds"):
                row[kind] = [round(turn.said[label][kind], 5) for turn in chosen]
        self.others_cpus = [round(turn.others_cpus, 2) for turn in chosen]

    def _turn(self, reverse: bool) -> Turn:
        """A round of every peer."""
        said: dict[str, Any] = {}

        def one(label: str) -> None:
            said[label] = self.workers[label].ask("round")

        began, busy = time.perf_counter(), machine_busy_seconds() - own_cpu_seconds()
        for label in sorted(self.workers, reverse=reverse):
            self._guarded(label, partial(one, label))
        others = machine_busy_seconds() - own_cpu_seconds() - busy
        return Turn(said, max(0.0, others) / (time.perf_counter() - began))

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
            for kind in ("seconds", "cpu_seconds"):
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
        network = networks[client].to(work.device)
        network.load_state_dict({name: torch.from_numpy(state[name]) for name in state.files})
        for part, (x, y) in (("train", work.train[client]), ("test", work.test[client])):
            labels = torch.from_numpy(y).long().to(work.device)
            with torch.no_grad():
                logits = network.eval()(torch.from_numpy(x).to(work.device))
            loss = float(torch.nn.functional.cross_entropy(logits, labels))
            accuracy = float((logits.argmax(1) == labels).float().mean())
            found.setdefault(f"{part}_loss", []).append(loss)
            found.setdefault(f"{part}_accuracy", []).append(accuracy)
    return {name: round(statistics.fmean(values), 4) for name, values in found.items()}


def alike(learned: dict[str, Any], first: dict[str, Any]) -> bool:
    kinds = learned.keys() & first.keys()
    return bool(kinds) and all(
        abs(learned[kind]["train_loss"] - first[kind]["train_loss"])
        <= max(ALIKE * first[kind]["train_loss"], SMALL_LOSS)
        for kind in kinds
    )


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['about']}; other processes kept {max(result['others_cpus']):.1f} cores busy",
        f"{'peer':<24}{'s a round':>10}{'times':>7}{'CPU s':>9}{'MiB':>7}{'steps':>7}  train loss",
    ]
    for row in result["rows"]:
        losses = {kind: found["train_loss"] for kind, found in row["learned"].items()}
        lines.append(
            f"{row['peer']:<24}{row['median_seconds']:>10.4f}{row['times_first']:>6.2f}×"
            f"{row['median_cpu_seconds']:>9.4f}{row['peak_memory_mib']:>7}"
            f"{row['steps_a_round']:>7}  {losses}" + ("" if row["learned_alike"] else " NOT ALIKE")
        )
    lines += [f"{label:<24}failed: {reason}" for label, reason in result["failed"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Spec.parse, action="append", required=True)
    parser.add_argument("--work", choices=list(WORKLOADS), action="append", required=True)
    parser.add_argument("--rounds", type=int, default=5, help="that are timed, of each peer")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="of a work, after which no turn begins"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="the record; '-': only print")
    parser.add_argument("--logs", type=Path, help="where to keep what peers print")
    parser.add_argument(
        "--patience", type=float, default=600, help="seconds for a round; then a peer is left out"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="first rounds, which are not timed, all at once: for peers that time nothing then",
    )
    parser.add_argument("--busy", action="store_true", help="record it on a busy machine too")
    parser.add_argument(
        "--lock",
        type=Path,
        help="a file that is locked (flock) while peers take turns, for minutes",
    )
    asked = parser.parse_args()
    kind = "cpu" if asked.device == "cpu" else "cuda"
    out = asked.out or HERE / "results" / f"peers_{kind}.json"
    with tempfile.TemporaryDirectory() as temporary:
        logs = asked.logs or Path(temporary)
        logs.mkdir(exist_ok=True, parents=True)
        for name in asked.work:
            lock = asked.lock or logs / "lock"
            turns = Turns(
                name,
                asked.peer,
                asked.device,
                asked.threads,
                logs,
                lock,
                asked.patience,
                asked.together,
            )
            recorded = str(out) != "-" and not asked.busy
            result = turns.run(
                asked.rounds, asked.rounds * (TRIES if recorded else 1), asked.seconds
            )
            print(table(result), end="\n\n", flush=True)
            if not result["quiet"] and not asked.busy:
                print("not recorded: the machine was not quiet (--busy records it all the same)")
            elif str(out) != "-":
                record = json.loads(out.read_text()) if out.is_file() else {}
                out.write_text(json.dumps(record | {name: result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
