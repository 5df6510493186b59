"""Flower's programs, forked from one process that has torch and perfed loaded.

Flower starts a program for every message at every site. From nothing that takes seconds: nearly all
of them import torch. Here one process imports everything once, and is forked for each program. A
forked program is a process like any other: it has a folder, an environment, streams and an exit
code of its own, computes the same numbers, and can be killed.

    Warm.start("flower-supernode", [...])   forks it
    Warm.environment()                      has a PATH with Flower's own programs, forked
    Warm.turn(seconds)                      forks what was asked for meanwhile, and says who ended

Flower looks for its programs by name. On that PATH each is a script that asks the warm process
through a socket in a folder of the user's own, hands over its streams, and waits. Who asked and the
forked program end together, and all of them with the warm process (on Linux also when it is
killed).

This file is also that script. So it imports nothing but Python's own light modules at first.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

FORKED = ("flower-superexec", "flwr-clientapp", "flwr-serverapp")
"""What Flower itself starts."""
STARTED = ("flower-superlink", "flower-supernode", "flwr", "perfed")
"""What is started here."""
LOADED = (
    "perfed.cli",
    "perfed.flower.client_app",
    "perfed.flower.server_app",
    "perfed.flower.gate",
    "flwr.cli.build",
    "sklearn.datasets",
    "torch.fx.experimental.symbolic_shapes",  # what torch imports for its first training step
)
POLLING = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
POLL_SECONDS = "0.2"
"""How often Flower looks whether a program is to be started; its own default is a second."""
PATIENCE = 5.0  # seconds that a program has to end by itself


class Warm:
    """The process that is forked. It must not start a thread: none of them would be in a fork. Nor
    may it ask for a GPU, be it whether there is one: CUDA would then work in no fork."""

    def __init__(self, programs: Mapping[str, Callable[[], object]] | None = None) -> None:
        import gc
        import tempfile
        from pathlib import Path

        self._programs = _loaded() if programs is None else programs
        gc.freeze()  # or every program would look through all of it when it ends
        self._folder = Path(tempfile.mkdtemp(prefix="perfed-"))  # nobody else's: mode 0700
        self._address = str(self._folder / "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen(100)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[int, socket.socket] = {}
        """Of the forked programs that somebody asked for."""
        self._own: set[int] = set()
        """The others, which were started here."""
        self._write_scripts()

    def _write_scripts(self) -> None:
        (self._folder / "bin").mkdir()
        for name in FORKED:
            script = self._folder / "bin" / name
            # Neither site-packages nor the user's own settings: such a Python starts in no time.
            ask = f"'{sys.executable}' -IS '{os.path.abspath(__file__)}' '{self._address}' {name}"
            script.write_text(f'#!/bin/sh\nexec {ask} "$@"\n', "utf-8")
            script.chmod(0o700)

    def environment(self, home: Path) -> dict[str, str]:
        """For Flower's programs: its settings are in ``home``, it reports to nobody, and starts
        its programs through here."""
        return {
            POLLING: POLL_SECONDS,
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{self._folder / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        }

    def start(
        self,
        program: str | Callable[[], object],
        words: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: int | None = None,
    ) -> int:
        """Fork a program, or what any function does; returns its process id. It writes to this
        file, or where this process does."""
        name = program if isinstance(program, str) else "perfed"
        function = self._programs[program] if isinstance(program, str) else program
        streams = {} if output is None else {1: output, 2: output}
        pid = self._fork(function, [name, *words], str(folder), dict(environment), streams)
        self._own.add(pid)
        return pid

    def _fork(
        self,
        program: Callable[[], object],
        words: list[str],
        folder: str,
        environment: dict[str, str],
        streams: Mapping[int, int],
    ) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._forget()
                _die_with(parent)
                _become(words, folder, environment, streams)
                code = _perform(program)
            finally:
                _end(code)
        return pid

    def _forget(self) -> None:
        """In a fork: what belongs to the warm process, and what that has to do at its own end, such
        as to delete its temporary folders."""
        import atexit
        import weakref

        atexit._clear()
        finalize: Any = weakref.finalize
        finalize._registry.clear()
        finalize._registered_with_atexit = False
        self._selector.close()
        for line in (self._listener, *self._lines.values()):
            line.close()
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def turn(self, seconds: float) -> dict[int, int]:
        """Fork what is asked for, for so many seconds or until one that was started here ends;
        returns the exit codes of those, negative for a signal."""
        ends = time.monotonic() + seconds
        while not (ended := self._reap()) and (left := ends - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, 0.05)):
                if key.fileobj is self._listener:
                    self._accept()
                else:  # who asked is gone
                    self._kill(int(key.data), signal.SIGKILL)
        return ended

    def _accept(self) -> None:
        line, _ = self._listener.accept()
        try:
            line.settimeout(PATIENCE)
            _, streams, _, _ = socket.recv_fds(line, 1, 3)
            with line.makefile("rb") as text:
                asked = json.loads(text.readline())
            program = self._programs[asked["words"][0]]
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            line.close()  # killed before it had asked
            return
        place = asked["folder"], asked["environment"]
        pid = self._fork(program, asked["words"], *place, dict(enumerate(streams)))
        for stream in streams:
            os.close(stream)
        self._lines[pid] = line
        self._selector.register(line, selectors.EVENT_READ, pid)
        _tell(line, pid)

    def _reap(self) -> dict[int, int]:
        ended = {}
        while self._lines or self._own:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            code = os.waitstatus_to_exitcode(status)
            if pid in self._lines:
                line = self._lines.pop(pid)
                self._selector.unregister(line)
                _tell(line, code)
                line.close()
            elif pid in self._own:
                self._own.remove(pid)
                ended[pid] = code
        return ended

    def _kill(self, pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def stop(self, pids: Sequence[int]) -> None:
        """These end, by themselves if they can: a site then says that it leaves."""
        waiting = {pid for pid in pids if pid in self._own}
        for number, patience in ((signal.SIGTERM, PATIENCE), (signal.SIGKILL, float("inf"))):
            for pid in waiting:
                self._kill(pid, number)
            ends = time.monotonic() + patience
            while waiting and time.monotonic() < ends:
                waiting -= self.turn(0.1).keys()

    def close(self) -> None:
        """Nothing that was forked is left, and no file."""
        import shutil

        self.stop(list(self._own))
        for pid in list(self._lines):
            self._kill(pid, signal.SIGKILL)
        while self._lines:
            self._reap()
            time.sleep(0.01)
        self._selector.close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _loaded() -> dict[str, Any]:
    """All that the programs need, imported; and the programs."""
    import importlib
    from importlib.metadata import entry_points

    for module in LOADED:
        importlib.import_module(module)
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    return {name: scripts[name].load() for name in (*FORKED, *STARTED)}


def _tell(line: socket.socket, number: int) -> None:
    with suppress(OSError):  # who asked may be gone
        line.sendall(b"%d\n" % number)


def _die_with(parent: int) -> None:
    """On Linux: be killed when the warm process ends, however it ends."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was quicker
            os._exit(1)


def _become(
    words: list[str], folder: str, environment: dict[str, str], streams: Mapping[int, int]
) -> None:
    for number, stream in streams.items():
        os.dup2(stream, number)
    for stream in {*streams.values()} - {*streams}:
        os.close(stream)
    os.setsid()  # Ctrl-C is for the warm process, which ends the others in order
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = words
    if sys.platform == "linux":
        with open("/proc/self/comm", "w") as name:  # what 'top' shows
            name.write(words[0][:15])


def _perform(program: Callable[[], object]) -> int:
    try:
        code = program()
    except SystemExit as stop:
        code = stop.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    return code if isinstance(code, int) else 0


def _end(code: int) -> NoReturn:
    """As Python ends, but for taking all modules apart: that copies most of what was forked."""
    import atexit
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _ask(address: str, words: list[str]) -> int:
    """What a script on the PATH does: its own streams, folder and environment are the program's."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    socket.send_fds(line, [b"."], [0, 1, 2])
    asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    line.sendall(json.dumps(asked).encode() + b"\n")
    answers = line.makefile("rb", 0)
    pid = int(answers.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda got, _: os.kill(pid, got))
    code = int(answers.readline() or b"1")
    return code if code >= 0 else 128 - code  # as a shell says it


if __name__ == "__main__":
    sys.exit(_ask(sys.argv[1], sys.argv[2:]))
