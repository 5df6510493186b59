"""Jobs that stop at their requests and go on together."""

from __future__ import annotations

import _thread
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from perfed.engines.stacked.together import _Thread, perform_together

Ask = Callable[[Any], Any]


class Plain:
    """Nothing to be done around a job's turns."""

    def begin(self, number: int) -> None: ...

    def pause(self, number: int) -> None: ...


class Noted:
    """Whose turn it is."""

    def __init__(self) -> None:
        self.inside: list[int] = []

    def begin(self, number: int) -> None:
        self.inside.append(number)

    def pause(self, number: int) -> None:
        self.inside.remove(number)


alone = Plain()


def test_requests_are_answered_together_and_each_gets_its_own() -> None:
    asked: list[list[Any]] = []

    def answer(requests: Sequence[Any]) -> list[Any]:
        asked.append(list(requests))
        return [request * 10 for request in requests]

    def work(number: int) -> Callable[[Ask], int]:
        def run(ask: Ask) -> int:
            total = 0
            for step in range(number):  # one asks never, one once, one twice
                total += ask(number + step)
            return total

        return run

    assert perform_together([work(n) for n in range(3)], answer, alone) == [0, 10, 20 + 30]
    assert asked == [[1, 2], [3], []]


def test_only_one_runs_at_a_time_inside_its_turn() -> None:
    turns, ran = Noted(), list[int]()

    def work(number: int) -> Callable[[Ask], None]:
        def run(ask: Ask) -> None:
            for _ in range(3):
                assert turns.inside == [number]
                ran.append(number)
                ask(None)
            assert turns.inside == [number]
            turns.pause(number)

        return run

    perform_together([work(n) for n in range(5)], lambda requests: [None] * len(requests), turns)
    assert ran == [0, 1, 2, 3, 4] * 3


class Broken(Exception):
    pass


@pytest.mark.parametrize("where", ["job", "answer"])
def test_an_error_comes_out_and_nothing_stays_behind(where: str) -> None:
    unwound: list[int] = []

    def work(number: int) -> Callable[[Ask], None]:
        def run(ask: Ask) -> None:
            try:
                ask(number)
                if number == 1:
                    raise Broken
                ask(number)
            finally:
                unwound.append(number)

        return run

    def answer(requests: Sequence[int]) -> list[None]:
        if where == "answer":
            raise Broken
        return [None] * len(requests)

    perform_together([lambda ask: None] * 3, lambda requests: [], alone)
    threads, idle = _thread._count(), len(_Thread.idle)
    with pytest.raises(Broken):
        perform_together([work(n) for n in range(3)], answer, alone)
    assert sorted(unwound) == [0, 1, 2]
    assert (_thread._count(), len(_Thread.idle)) == (threads, idle)


def test_a_forked_process_has_threads_of_its_own() -> None:
    def work(ask: Ask) -> int:
        return int(ask(20)) + 1

    def answer(requests: Sequence[int]) -> list[int]:
        return [2 * request for request in requests]

    assert perform_together([work] * 2, answer, alone) == [41, 41]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork() where there are threads
        child = os.fork()
    if child == 0:
        os._exit(0 if perform_together([work] * 2, answer, alone) == [41, 41] else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals reach the main thread",
)
def test_an_interrupt_in_the_middle_of_a_turn_ends_all_jobs() -> None:
    """A real Ctrl-C, while the conductor waits for a job that is at work."""
    begun: list[int] = []
    ended: list[int] = []

    def work(ask: Ask) -> None:
        begun.append(1)
        try:
            for step in range(1000):
                time.sleep(0.005)
                ask(step)
        finally:
            time.sleep(0.005)  # ending takes a moment, and is waited for
            ended.append(1)

    def interrupt() -> None:
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for _ in range(10):
            begun.clear()
            ended.clear()
            _thread.start_new_thread(interrupt, ())
            with pytest.raises(KeyboardInterrupt):
                perform_together([work] * 5, lambda requests: [None] * len(requests), alone)
            assert len(ended) == len(begun) > 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_job_that_asks_while_it_is_ended_ends_all_the_same() -> None:
    ended: list[int] = []

    def work(ask: Ask) -> None:
        try:
            ask(1)
        finally:
            ask(2)
            ended.append(1)  # not reached: nobody answers any more

    def answer(requests: Sequence[int]) -> list[None]:
        raise Broken

    idle = len(_Thread.idle)
    with pytest.raises(Broken):
        perform_together([work] * 3, answer, alone)
    assert not ended
    assert len(_Thread.idle) >= max(idle, 3)
