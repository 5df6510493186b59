"""Many jobs at once, each stopping at its next request until all have made one.

Every job runs in a thread of its own, but never two at a time: a job runs until it asks for
something, then the next one does. When all of them wait, their requests are answered together.
So a client method stays plain code for one client, with any ``if`` it likes, and yet the engine
sees what all clients want at the same moment.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, TypeVar

Request = TypeVar("Request")
Answer = Callable[[Sequence[Request]], Sequence[Any]]
Ask = Callable[[Request], Any]


class _Abandoned(BaseException):
    """Unwinds a job that nobody waits for any more."""


class _Thread:
    """Runs one job after another: a new thread for each would cost more than many a job."""

    idle: ClassVar[list[_Thread]] = []

    def __init__(self) -> None:
        self.work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # Not threading.Thread, whose start() waits for the new thread.
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        while True:
            self.work.get()()

    @classmethod
    def any(cls) -> _Thread:
        try:
            return cls.idle.pop()
        except IndexError:
            return cls()


if hasattr(os, "register_at_fork"):  # a child process has none of its parent's threads
    os.register_at_fork(after_in_child=_Thread.idle.clear)


class _Member(Generic[Request]):
    """A job, and the two batons that say whether it or the conductor is running."""

    def __init__(self, work: Callable[[Ask[Request]], Any]) -> None:
        self._work = work
        self._thread = _Thread.any()
        self._rest: SimpleQueue[None] = SimpleQueue()
        self._abandoned = self._ended = False
        self.request: Request | None = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None

    def _run(self) -> None:
        if self._ended:
            return
        try:
            if not self._abandoned:
                self.result = self._work(self._ask)
        except _Abandoned:
            pass
        except BaseException as error:  # raised again where the jobs were started
            self.error = error
        self._ended = True
        _Thread.idle.append(self._thread)
        self._rest.put(None)

    def _ask(self, request: Request) -> Any:
        self.request = request
        self._rest.put(None)
        self._thread.work.get()  # the next turn
        if self._abandoned:
            raise _Abandoned
        answer, self.answer, self.request = self.answer, None, None
        return answer

    def take_turn(self) -> None:
        """Let the job run until it asks or ends."""
        self._thread.work.put(self._run)  # which begins the job, or lets it go on
        self._rest.get()

    def abandon(self) -> None:
        self._abandoned = True
        while not self._ended:  # twice, where an interrupt came in the middle of its turn
            self.take_turn()


def perform_together(
    works: Sequence[Callable[[Ask[Request]], Any]],
    answer: Answer[Request],
    turn: Callable[[int], AbstractContextManager[Any]],
) -> list[Any]:
    """What each of ``works`` returns; ``turn(i)`` surrounds every stretch that work *i* runs."""
    members: list[_Member[Request]] = []
    try:
        for work in works:
            members.append(_Member(work))
        waiting = list(enumerate(members))
        while waiting:
            for number, member in waiting:
                with turn(number):
                    member.take_turn()
                if member.error is not None:
                    raise member.error
            waiting = [(i, member) for i, member in waiting if member.request is not None]
            requests = [member.request for _, member in waiting if member.request is not None]
            for (_, member), given in zip(waiting, answer(requests), strict=True):
                member.answer = given
    finally:
        for member in members:
            member.abandon()
    return [member.result for member in members]
