"""Real Flower processes on loopback: a superlink, supernodes, ``flwr run``."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests import warm

BIN = Path(sys.executable).parent
"""Where Flower's programs are. Those in ``warm.programs()`` are the same, without the imports."""
PATIENCE = 300.0  # seconds; a busy machine is slow, not wrong


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"not within {seconds} s: {what}"
        time.sleep(0.2)


def descendants(pid: int) -> list[int]:
    """Children and theirs, also those that ``tests/warm.py`` forked for them.

    Some are in sessions of their own, where no group's signal is heard.
    """
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            child, _, rest = stat.read_text().partition(" (")
            name, _, numbers = rest.rpartition(") ")
            fostered = name.startswith(warm.FOSTERED)
            parent = name.removeprefix(warm.FOSTERED) if fostered else numbers.split()[1]
            children.setdefault(int(parent), []).append(int(child))
    found = children.get(pid, [])
    return found + [further for child in found for further in descendants(child)]


def kill(pids: Iterable[int]) -> None:
    """Until they are gone, and their ports free."""
    killed = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            killed.append(os.pidfd_open(pid))
            signal.pidfd_send_signal(killed[-1], signal.SIGKILL)
    for process in killed:
        select.select([process], [], [], PATIENCE)  # readable when it has ended
        os.close(process)


END_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Becomes another program, which is killed when what started it ends, however that ends."""


class Process:
    """A program with its children, its output in a file. It ends with the tests.

    Flower's programs end when those that started them do.
    """

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        program = shutil.which(command[0], path=environment["PATH"])
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-IS", "-c", END_WITH_PARENT, str(program), *command[1:]],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def text(self) -> str:
        return self.log.read_text("utf-8", errors="replace")

    def kill(self) -> None:
        """SIGKILL, to it and all its children: as when a machine loses power."""
        kill([self.pid, *descendants(self.pid)])
        self._process.wait()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def code(self) -> int:
        return self._process.wait(PATIENCE)


class Network:
    """A superlink and its supernodes, in one folder; their programs are in another one."""

    def __init__(self, folder: Path, programs: Path, *, certificates: Path | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.fleet_port = self.port
        """Where supernodes look for the superlink: at itself, or at a proxy before it."""
        self.gate_port = free_port()
        self.certificates = certificates
        self.processes: list[Process] = []
        home = folder / "flwr-home"
        home.mkdir(parents=True)
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
            "OMP_NUM_THREADS": "1",
        }
        self.use(programs)
        tls = (
            f'root-certificates = "{certificates / "ca.crt"}"'
            if certificates
            else "insecure = true"
        )
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "loop"\n\n'
            f'[superlink.loop]\naddress = "127.0.0.1:{self.port}"\n{tls}\n\n'
            f'[superlink.gate]\naddress = "127.0.0.1:{self.gate_port}"\n{tls}\n'
        )

    def use(self, programs: Path) -> None:
        """For what is started from now on."""
        self.environment["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"

    def start(self, name: str, *command: str) -> Process:
        process = Process(list(command), self.folder / f"{name}.log", self.environment)
        self.processes.append(process)
        return process

    def superlink(self) -> Process:
        command = ["flower-superlink", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--disable-runtime-dependency-installation"]
        command += ["--database", str(self.folder / "superlink.db")]
        if self.certificates:
            command += ["--ssl-ca-certfile", str(self.certificates / "ca.crt")]
            command += ["--ssl-certfile", str(self.certificates / "server.crt")]
            command += ["--ssl-keyfile", str(self.certificates / "server.key")]
            command += ["--enable-supernode-auth"]
        else:
            command += ["--insecure"]
        process = self.start("superlink", *command)
        wait_until(lambda: listens(self.port), f"the superlink listens:\n{process.text()}")
        return process

    def gate(self) -> Process:
        """The supernodes started after it go through it."""
        command = ["perfed", "federation", "gate", "--certificates", str(self.certificates)]
        command += ["--superlink", f"127.0.0.1:{self.port}"]
        command += ["--host", "127.0.0.1", "--port", str(self.gate_port)]
        process = self.start("gate", *command)
        wait_until(lambda: listens(self.gate_port), f"the gate listens:\n{process.text()}")
        self.fleet_port = self.gate_port
        return process

    def supernode(self, name: str, site: Path, *more: str) -> Process:
        command = ["flower-supernode", "--superlink", f"127.0.0.1:{self.fleet_port}"]
        command += ["--port", str(free_port()), "--node-config", f'site="{site}"', *more]
        if not self.certificates:
            command += ["--insecure"]
        return self.start(name, *command)

    def run(self, name: str, app: Path, coordinator: Path) -> Process:
        """``flwr run``, which ends when the run does."""
        setting = f'coordinator="{coordinator}"'
        return self.start(name, "flwr", "run", str(app), "loop", "--stream", "-c", setting)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()


@contextlib.contextmanager
def network(
    folder: Path, programs: Path = BIN, *, certificates: Path | None = None
) -> Iterator[Network]:
    made = Network(folder, programs, certificates=certificates)
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder / "flwr-home", ignore_errors=True)
