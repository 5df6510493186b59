"""Many jobs at once, each stopping at its next request until all have made one.

Every job runs in a thread of its own, but never two at a time: a job runs until it asks for
something, then the next one does. When all of them wait, their requests are answered together.
So a client method stays plain code for one client, with any ``if`` it likes, and yet the engine
sees what all clients want at the same moment.
"""

from __future__ import annotations

import _thread
import os
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, Protocol, TypeVar

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


class Turns(Protocol):
    """What is done around every stretch that a job runs, in the thread that runs it."""

    def begin(self, number: int) -> None: ...

    def pause(self, number: int) -> None:
        """It has asked, and will go on later."""


class _Baton(Generic[Request]):
    """Says who runs: the conductor or one of the jobs.

    Whoever stops wakes the next job, and the last one the conductor: to change from one thread to
    another takes longer than what many a job does in its turn.
    """

    def __init__(self) -> None:
        self._next: Iterator[_Member[Request]] = iter(())
        self._with_conductor = True
        self._back: SimpleQueue[None] = SimpleQueue()

    def go_round(self, members: Sequence[_Member[Request]]) -> None:
        """Let each of them run until it asks or ends."""
        self._regain()
        self._next = iter(members)
        try:
            self.pass_on()
            self._regain()
        except BaseException:  # an interrupt: whoever runs now is the last
            self._next = iter(())
            self._regain()
            raise

    def pass_on(self, last: bool = False) -> None:
        member = None if last else next(self._next, None)
        if member is None:
            self._with_conductor = True
            self._back.put(None)
        else:
            wake, run = member.thread.work.put, member.run
            self._with_conductor = False  # no interrupt comes between this and the next line
            wake(run)

    def _regain(self) -> None:
        while not self._with_conductor:  # an interrupt may have left something in the queue
            self._back.get()


class _Member(Generic[Request]):
    """A job."""

    def __init__(
        self,
        work: Callable[[Ask[Request]], Any],
        number: int,
        turns: Turns,
        baton: _Baton[Request],
    ) -> None:
        self._work, self._number, self._turns, self._baton = work, number, turns, baton
        self.thread = _Thread.any()
        self.abandoned = self.ended = False
        self.request: Any = None
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """From its beginning to its end; woken by the same once it has begun, it goes on."""
        try:
            if not self.abandoned:
                self._turns.begin(self._number)
                self.result = self._work(self._ask)
        except _Abandoned:
            pass
        except BaseException as error:  # raised again where the jobs were started
            self.error = error
        self.ended = True
        _Thread.idle.append(self.thread)
        self._baton.pass_on(last=self.error is not None)

    def _ask(self, request: Request) -> Any:
        self.request = request
        self._turns.pause(self._number)
        self._baton.pass_on()
        self.thread.work.get()  # the next turn
        if self.abandoned:
            raise _Abandoned
        self._turns.begin(self._number)
        answer, self.answer, self.request = self.answer, None, None
        return answer


def perform_together(
    works: Sequence[Callable[[Ask[Request]], Any]], answer: Answer[Request], turns: Turns
) -> list[Any]:
    """What each of ``works`` returns."""
    members: list[_Member[Request]] = []
    baton: _Baton[Request] = _Baton()
    try:
        for number, work in enumerate(works):
            members.append(_Member(work, number, turns, baton))
        waiting = members
        while waiting:
            baton.go_round(waiting)
            for member in waiting:
                if member.error is not None:
                    raise member.error
            waiting = [member for member in waiting if not member.ended]
            requests = [member.request for member in waiting]
            for member, given in zip(waiting, answer(requests), strict=True):
                member.answer = given
    finally:
        while left := [member for member in members if not member.ended]:
            for member in left:
                member.abandoned = True
            baton.go_round(left)
    return [member.result for member in members]
