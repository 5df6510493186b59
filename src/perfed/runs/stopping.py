"""Ctrl-C: the round that is going on is finished and saved; a second one stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class Stopped(KeyboardInterrupt):
    """As asked, after a round that is saved."""


class Stop:
    """Whether runs that go on together have been asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first Ctrl-C asks, a second one is what it always is. Python lets the main thread
        alone listen; whoever has a handler of his own, or ignores Ctrl-C, keeps it so."""
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if not ours or threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGINT, self._ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with suppress(RuntimeError):  # it came while a line was being written there
            print("stopping after this round; Ctrl-C again stops at once", file=sys.stderr)
