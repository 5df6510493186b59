"""One process at a time, on every system: locks that go with their process, however it ends.

The package filelock knows how each system locks a file, and comes with torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MOMENT = 0.25  # seconds: who only looks whether a lock is held has it for less


@contextmanager
def locked(path: Path, patience: float | None = MOMENT) -> Iterator[None]:
    """TimeoutError where another process still has it after ``patience`` seconds; None: wait."""
    timeout = -1 if patience is None else patience
    with FileLock(path).acquire(timeout, poll_interval=0.05):
        yield


def is_held(path: Path) -> bool:
    """Whether a process has it; of a folder that may only be read, too, where the system can."""
    if not path.is_file():
        return False
    if fcntl is None:
        return _cannot_be_had(path)
    with open(path, "rb") as file:
        try:  # shared, so that two that look do not take each other for a run
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _cannot_be_had(path: Path) -> bool:
    try:
        with locked(path):
            return False
    except TimeoutError:
        return True
