"""Ray: started where there is none, quiet, and gone when the last run is over.

Nothing else here imports it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from perfed.core.errors import ConfigError, RunError
from perfed.engines.ray.bank import Bank

PATIENCE = 30.0  # seconds until one is told that workers are waited for
FREE_CORE = 10.0  # seconds for Ray to find a core for a worker that takes another's place
FAREWELL = 2.0  # seconds for a worker to tidy up

log = logging.getLogger("perfed")
_current: Session | None = None


class WorkerDied(Exception):
    """A worker has gone before it answered."""


@contextmanager
def session() -> Iterator[Session]:
    """Ray, from its first use in here to the end; workers that one run leaves are there for the
    next. A session inside another is the same one."""
    global _current
    if _current is not None:
        yield _current
        return
    _current = Session()
    try:
        yield _current
    finally:
        _current.close()
        _current = None


class Session:
    def __init__(self) -> None:
        self._idle: dict[float, list[Any]] = {}
        address = os.environ.get("RAY_ADDRESS") or "local"
        ray = import_ray()
        self._address = None if ray.is_initialized() else address
        """Where Ray is started or joined; None where somebody has done that already."""
        self.shared = self._address != "local"
        """Whether the machine, or the cluster, may have other work to do."""

    @cached_property
    def _ray(self) -> Any:
        ray = import_ray()
        if self._address is None:
            return ray
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if not self.shared:
            quiet["include_dashboard"] = False
        try:
            knock(self._address)
            with _own_sigterm():
                ray.init(self._address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            where = (
                f"no Ray at RAY_ADDRESS={self._address}" if self.shared else "Ray does not start"
            )
            raise RunError(f"{where}: {reason}") from None
        return ray

    def count(self, what: str) -> int:
        """How many ``GPU`` or ``CPU`` there are."""
        return int(self._ray.cluster_resources().get(what, 0))

    def take(self, gpus: float) -> Any:
        """A worker of one core, or of so much of a GPU."""
        idle = self._idle.setdefault(gpus, [])
        # On a Ray of our own, who asks for more workers than cores gets them.
        return idle.pop() if idle else self._new(1.0 if self.shared and not gpus else 0.0, gpus)

    def take_place(self, gpus: float) -> tuple[Any, bool]:
        """A worker in the place of one that has died, and whether it shares a core with others:
        where a machine is lost, there may be none left for it alone. For a GPU it waits."""
        worker = self.take(gpus)
        if gpus or not self.shared:
            return worker, False
        there, _ = self._ray.wait([self.send(worker, "clear")], timeout=FREE_CORE)
        if there:
            return worker, False
        self.kill(worker)
        return self._new(0.0, gpus), True

    def free_cores(self) -> int:
        return int(self._ray.available_resources().get("CPU", 0))

    def _new(self, cpus: float, gpus: float) -> Any:
        options = {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": "SPREAD"}
        return self._ray.remote(Bank).options(**options).remote()

    def give(self, workers: Sequence[Any], gpus: float) -> None:
        """Have them back; one that is busy, or dead, goes."""
        farewells = {self.send(worker, "clear"): worker for worker in workers}
        done, _ = self._ray.wait(list(farewells), num_returns=len(farewells), timeout=FAREWELL)
        for farewell, worker in farewells.items():
            try:
                if farewell not in done:
                    raise WorkerDied
                self.answer(farewell)
            except WorkerDied:
                self.kill(worker)
            else:
                self._idle[gpus].append(worker)

    def kill(self, worker: Any) -> None:
        self._ray.kill(worker)

    def put(self, value: Any) -> Any:
        """A value to send to several workers, once for each machine."""
        return self._ray.put(value)

    def send(self, worker: Any, method: str, *arguments: Any) -> Any:
        """Have a worker do something after all it was told before; the answer to come."""
        return getattr(worker, method).remote(*arguments)

    def answer(self, coming: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(coming)
        except errors.RayTaskError as error:
            raise error.cause from error
        except (errors.RayActorError, errors.ObjectLostError) as error:
            raise WorkerDied(str(error).splitlines()[0]) from None

    def wait_for(self, coming: Sequence[Any]) -> None:
        """Until all have an answer, with a line where that takes long."""
        done, _ = self._ray.wait(list(coming), num_returns=len(coming), timeout=PATIENCE)
        if len(done) < len(coming):
            log.warning("waiting for Ray to start %d more workers", len(coming) - len(done))
            self._ray.wait(list(coming), num_returns=len(coming))

    def close(self) -> None:
        for workers in self._idle.values():
            for worker in workers:
                self.kill(worker)
        if self._address is not None and "_ray" in vars(self):
            self._ray.shutdown()


def knock(address: str) -> None:
    """Raise OSError where nobody listens: Ray would go on trying for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()


# Ray reads these when it is imported. The first keeps it from printing at length, among the
# results, what is said here in one line: that a worker has died. The last spares a warning.
QUIET = {
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray has SIGTERM end Python at once: a run that listens to it would lose its round."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def import_ray() -> Any:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.exceptions
    except ImportError:
        message = "Ray is not installed: pip install 'perfed[ray]'"
        raise ConfigError(message, "--engine ray") from None
    return ray
