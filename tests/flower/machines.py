"""A network of its own: in it every port is free, and names lead to this machine.

Linux gives one to anybody, where it is allowed to (``unshare``). Commands that name ports and hosts
can then be run as they stand, whatever else runs on the machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.flower.processes import BIN, Process

HOLD = """
import fcntl, socket, struct, subprocess, sys
with socket.socket() as any_socket:
    up = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # IFF_UP, IFF_RUNNING
    fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS
subprocess.run(["mount", "--bind", sys.argv[1], "/etc/hosts"], check=True)
print("ready", flush=True)
sys.stdin.read()
"""
NEW = ["unshare", "--user", "--map-root-user", "--net", "--mount"]


def allowed() -> bool:
    if not all(map(shutil.which, ("unshare", "nsenter", "mount"))):
        return False
    return subprocess.run([*NEW, "true"], capture_output=True).returncode == 0


@dataclass
class Machines:
    """Folders stand for machines: they share nothing but this network."""

    holder: int
    processes: list[Process]

    def start(self, folder: Path, name: str, command: str) -> Process:
        """In a terminal of its own."""
        enter = ["nsenter", "--preserve-credentials", "--user", "--net", "--mount"]
        enter += [f"--target={self.holder}", f"--wd={folder}", "bash", "-c", command]
        environment = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
        process = Process(enter, folder / f"{name}.log", environment | {"OMP_NUM_THREADS": "1"})
        self.processes.append(process)
        return process

    def run(self, folder: Path, name: str, command: str) -> tuple[int, str]:
        """To its end."""
        (folder / f"{name}.log").unlink(missing_ok=True)
        process = self.start(folder, name, command)
        return process.code(), process.text()


@contextlib.contextmanager
def machines(folder: Path, host: str) -> Iterator[Machines]:
    """All of them are called ``host``."""
    hosts = folder / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {host}\n")
    command = [*NEW, sys.executable, "-c", HOLD, str(hosts)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    made = Machines(holder.pid, [])
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        yield made
    finally:
        for process in made.processes:
            process.kill()
        holder.communicate()
