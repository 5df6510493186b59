"""A study on several cores or GPUs: its cells, a process each, as many at once as there is room.

A process reads the study for itself, runs one cell after another, and leaves records; nothing else
passes between them. So the numbers are those of one process, and a stopped study goes on as ever.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from perfed.core.errors import ConfigError, RunError
from perfed.engines import Execution
from perfed.runs.design import Cell, Conduct, design
from perfed.runs.simulation import AUTOMATIC
from perfed.runs.stopping import SIGNALS, Stopped

Say = Callable[[str], None]
_own: dict[str, Any] = {}
"""What a process keeps from one cell to the next."""


def available() -> int:
    """How many cells this machine can run at once: a GPU each, or a core without one."""
    if gpus := torch.cuda.device_count():
        return gpus
    if hasattr(os, "sched_getaffinity"):  # the cores that this process may use; not on a Mac
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run(
    values: Mapping[str, Any],
    folder: Path,
    cells: Sequence[Cell],
    count: int,
    how: Execution = AUTOMATIC,
    seconds: float = float("inf"),
    side_by_side: bool = False,
    say: Say = print,
) -> None:
    """Run what has no record yet of these cells, ``count`` of them at once."""
    if how.engine == "ray":
        raise ConfigError("Ray has workers of its own: leave one of the two out", "--processes")
    ends = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")  # a fork of torch's threads would hang
    numbers = context.Queue()
    for number in range(count):
        numbers.put(number)
    start = (dict(values), folder, how, side_by_side, count, numbers)
    with _stoppable(), ProcessPoolExecutor(count, context, _begin, start) as pool, _ended(pool):
        jobs = {
            pool.submit(_run_cell, cell.setting, cell.method.name, ends - time.monotonic()): cell
            for cell in cells
        }
        for done, job in enumerate(as_completed(jobs), start=1):
            cell, error = jobs[job], _error_of(job)
            if error is not None:
                raise error
            say(f"{cell.setting}, {cell.method.name}: done ({done} of {len(jobs)})")


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM and SIGHUP are like Ctrl-C here: processes must not be left behind."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    others = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    before = {number: signal.signal(number, stop) for number in others}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ended(pool: ProcessPoolExecutor) -> Iterator[None]:
    """Where this ends early, what runs is asked to save its round, and nothing more is begun."""
    others = {*multiprocessing.active_children()}
    try:
        yield
    except BaseException:
        for process in {*multiprocessing.active_children()} - others:
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)
        raise


def _error_of(job: Future[None]) -> BaseException | None:
    error = job.exception()
    if isinstance(error, BrokenProcessPool):
        return RunError("a process has died (memory?); the same command goes on")
    return error


def _begin(
    values: Mapping[str, Any],
    folder: Path,
    how: Execution,
    side_by_side: bool,
    count: int,
    numbers: Any,
) -> None:
    """In a new process: its share of the cores, and a GPU of its own where there are several.
    Ctrl-C is for the process that started it, which then asks this one to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    try:
        number = numbers.get(timeout=10)
    except queue.Empty:  # in the place of one that has died
        number = 0
    gpus = torch.cuda.device_count()
    if gpus and how.device in ("auto", "cuda"):
        how = dataclasses.replace(how, device=f"cuda:{number % gpus}")
    _own.update(conduct=Conduct(design(values), folder), how=how, side_by_side=side_by_side)


def _run_cell(setting: str, method: str, seconds: float) -> None:
    conduct: Conduct = _own["conduct"]
    try:
        conduct.run(
            _own["how"],
            seconds=seconds,
            side_by_side=_own["side_by_side"],
            methods=[method],
            settings=[setting],
        )
    except Stopped:  # as asked, after its round, which is saved
        # Not back to the pool: a process that was ended while it waited for a cell may have taken
        # with it what the others wait for, and nobody would end this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
