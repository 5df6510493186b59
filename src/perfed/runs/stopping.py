"""Ctrl-C, SIGTERM (kill, a scheduler, a shutdown) and SIGHUP (a terminal that is closed): the round
that is going on is finished and saved; a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
"""Windows has no SIGHUP."""


class Stopped(KeyboardInterrupt):
    """As asked, after a round that is saved."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.number = number
        """Of the signal that asked."""


class Stop:
    """Whether runs that go on together have been asked to stop."""

    def __init__(self) -> None:
        self.asked = False
        self.number: int = signal.SIGINT

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first signal asks. A second Ctrl-C is what it always is; the others come twice
        without anybody's wish (a shell passes SIGHUP on), and ask once more. Python lets the main
        thread alone listen; whoever has a handler of his own, or ignores a signal, keeps it so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in SIGNALS}
        ours = {number: handler for number, handler in before.items() if _is_default(handler)}
        for number in ours:
            signal.signal(number, self._ask)
        try:
            yield
        finally:
            for number, handler in ours.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) == self._ask:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.asked:
            return
        self.asked, self.number = True, number
        # It may come while a line is being written there, or when the terminal is gone.
        with suppress(RuntimeError, OSError):
            print("stopping after this round; Ctrl-C again stops at once", file=sys.stderr)


def _is_default(handler: Any) -> bool:
    """Ray, where it is imported, has SIGTERM end Python: nobody has chosen that."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return str(getattr(handler, "__module__", "")).startswith("ray.")
