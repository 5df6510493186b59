"""CPU-seconds and memory of a process with all its descendants, from /proc."""

from __future__ import annotations

import os
import threading
from pathlib import Path

TICK = 1 / os.sysconf("SC_CLK_TCK")
KIB = 1024


def family(pid: int) -> list[int]:
    """The process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def others_cpu_seconds(pid: int) -> float:
    """Of the descendants, to the tick."""
    return sum(_ticks(one) for one in family(pid)[1:])


def own_cpu_seconds() -> float:
    """Of this process and its descendants, to the tick."""
    return sum(_ticks(one) for one in family(os.getpid()))


def _ticks(pid: int) -> float:
    """User and system time, with that of children that have ended."""
    fields = _stat(pid)
    return TICK * sum(map(int, fields[11:15])) if fields else 0.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return []


def resident_bytes(pids: list[int]) -> int:
    """Memory of these processes; what they share is counted once, as far as one of them has it."""
    private, shared = 0, [0]
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        private += kib["Private_Clean"] + kib["Private_Dirty"]
        shared.append(kib["Shared_Clean"] + kib["Shared_Dirty"])
    return (private + max(shared)) * KIB


def peak_bytes(pid: int) -> int:
    """The most memory that one process has had at any time; 0 where the kernel does not say."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * KIB for line in lines if line.startswith("VmHWM")), 0)


class PeakMemory:
    """The largest memory of a family of processes, looked at all the time while it is open."""

    def __init__(self, pid: int, pause: float = 0.2) -> None:
        self.pid, self.pause, self.bytes = pid, pause, 0

    def __enter__(self) -> PeakMemory:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.bytes = max(self.bytes, resident_bytes(family(self.pid)))
            if self._ended.wait(self.pause):
                return


def machine_busy_seconds() -> float:
    """CPU-seconds that all processes of the machine have used since it started."""
    user, nice, system, _idle, _wait, irq, softirq, *_ = (
        int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return TICK * (user + nice + system + irq + softirq)
