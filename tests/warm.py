"""``perfed`` and Flower's programs in processes that need not import torch first.

Importing is most of what a short command takes. One process imports everything, once, and is forked
for every command, which is then a process like any other: with a working directory, environment,
streams and exit code of its own, and it can be killed. (That the program starts from nothing is
shown where it is started from nothing: ``cli/test_doctor.py``, ``cli/test_completion.py``.)

    start(["run", ...])    a process, as subprocess.Popen makes one
    perform(["run", ...])  what it has said when it has ended, as subprocess.run does
    programs()             a folder to put on PATH, with the programs in ``PROGRAMS``

Instead of a command's words there may be a Python file and its words, as after ``python``, or the
words of another program: ``start([...], program="flwr")``.

None of them outlives the process of the tests, however that ends: the forking process waits for the
end of a pipe, and then kills all that it has forked.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

PROGRAMS = (
    "perfed",
    "flower-superexec",
    "flower-superlink",
    "flower-supernode",
    "flwr",
    "flwr-clientapp",
    "flwr-serverapp",
)
FOSTERED = "warm-"
"""The name of a forked process begins with it. Then comes the number of the one that asked."""
FLOWER = (
    "perfed.flower.client_app",
    "perfed.flower.server_app",
    "flwr.cli.app",
    "flwr.supercore.cli",
    "flwr.superlink.cli",
    "flwr.supernode.cli",
)
IMPORTED = (
    "perfed.cli",
    "perfed.engines.stacked",
    "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_pdf",
    "matplotlib.backends.backend_svg",
    "pandas",
    "scipy.optimize",
    "sklearn.datasets",
    "torch.fx.experimental.symbolic_shapes",  # what torch imports for its first recording
    *(FLOWER if importlib.util.find_spec("flwr") else ()),
)


class Warm:
    """A forked process, seen from here."""

    def __init__(
        self, address: str, words: Sequence[str], streams: list[int], **place: object
    ) -> None:
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(address)
        socket.send_fds(self._line, [b"."], streams)
        self._line.sendall(json.dumps({"words": words, **place}).encode() + b"\n")
        self._answers = self._line.makefile("rb", 0)
        self.pid = int(self._answers.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """As that of subprocess.Popen: the exit code, negative for a signal, where it has ended."""
        if self.returncode is None and selectable(self._line):
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._line.settimeout(timeout)
            self.returncode = int(self._answers.readline())
            self._line.close()
        return self.returncode

    def kill(self) -> None:
        """Until it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()


def selectable(line: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(line, selectors.EVENT_READ)
        return bool(selector.select(0))


def start(
    words: Sequence[object],
    *,
    program: str = "perfed",
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: IO[Any] | None = None,
    stdout: IO[Any] | None = None,
    stderr: IO[Any] | None = None,
) -> Warm:
    with open(os.devnull, "r+b") as nothing:
        streams = [(stream or nothing).fileno() for stream in (stdin, stdout, stderr)]
        return Warm(
            server(),
            list(map(str, words)),
            streams,
            program=program,
            asker=os.getpid(),
            folder=str(cwd or Path.cwd()),
            environment=dict(os.environ if env is None else env),
        )


def perform(
    words: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    with (
        tempfile.TemporaryFile("w+") as given,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as error,
    ):
        given.write(input)
        given.seek(0)
        process = start(words, cwd=cwd, env=env, stdin=given, stdout=out, stderr=error)
        try:
            code = process.wait(timeout)
        except TimeoutError:
            os.kill(process.pid, signal.SIGKILL)
            raise
        said = [stream.seek(0) or stream.read() for stream in (out, error)]
    return subprocess.CompletedProcess(list(words), code, *said)


@functools.cache
def server() -> str:
    """Its address. It ends with this process."""
    address = tempfile.mkdtemp(prefix="perfed-warm-") + "/socket"
    process = subprocess.Popen(
        [sys.executable, __file__, "serve", address, *IMPORTED],
        stdin=subprocess.PIPE,  # ends when this process does, however it does
        stdout=subprocess.DEVNULL,
        # Flower reads whether to report to its makers when it is imported.
        env=os.environ | {"OMP_NUM_THREADS": "1", "FLWR_TELEMETRY_ENABLED": "0"},
        start_new_session=True,
    )

    def end() -> None:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()

    atexit.register(end)
    while not os.path.exists(address):
        assert process.poll() is None
        time.sleep(0.02)
    return address


@functools.cache
def programs() -> Path:
    folder = Path(server()).parent / "bin"
    folder.mkdir()
    for name in PROGRAMS:
        script = folder / name
        # Neither site-packages nor the user's own settings: such a Python starts in no time.
        ask = f"{sys.executable} -IS {__file__} ask {server()} {name}"
        script.write_text(f'#!/bin/sh\nexec {ask} "$@"\n')
        script.chmod(0o755)
    return folder


def ask(address: str, program: str, words: list[str]) -> int:
    """What a program does: its own streams, folder and environment are the command's."""
    place = {"program": program, "asker": os.getpid(), "folder": os.getcwd()}
    place["environment"] = dict(os.environ)
    code = Warm(address, words, [0, 1, 2], **place).wait()
    return code if code >= 0 else 128 - code  # as a shell says it


def serve(address: str, modules: list[str]) -> None:
    """Return in every forked process, ready to be the command; in the first one, never."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # or every command would look through all of it when it ends
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno())
    running: dict[int, socket.socket] = {}
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(100)
    os.rename(address + ".new", address)  # there, it listens
    selector = selectors.DefaultSelector()
    for source in (0, ended, listener):
        selector.register(source, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                shutil.rmtree(os.path.dirname(address))
                os._exit(0)
            elif key.fileobj is ended:
                ended.recv(100)
                while running:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                    if pid == 0:
                        break
                    tell(running.pop(pid), os.waitstatus_to_exitcode(status))
            else:
                line, _ = listener.accept()
                _, streams, _, _ = socket.recv_fds(line, 1, 3)
                request = json.loads(line.makefile().readline())
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for one in (selector, ended, wake, listener, line, *running.values()):
                        one.close()
                    become(streams, **request)
                    return
                for stream in streams:
                    os.close(stream)
                running[pid] = line
                tell(line, pid)


def tell(line: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # who asked may be gone
        line.sendall(b"%d\n" % number)


def become(
    streams: list[int],
    words: list[str],
    program: str,
    asker: int,
    folder: str,
    environment: dict[str, str],
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.setsid()  # a signal to its group is not for the others
    name_after(asker)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if not (words and words[0].endswith(".py")):
        words = [str(Path(sys.executable).with_name(program)), *words]
    sys.argv[:] = words
    sys.path[0] = str(Path(words[0]).parent)


def name_after(asker: int) -> None:
    """Who looks for the asker's children cannot find this one by its parent, but by its name."""
    name = Path("/proc/self/comm")
    if name.exists():
        name.write_text(f"{FOSTERED}{asker}")


def end(code: int) -> NoReturn:
    """As Python ends, but for taking all modules apart: that copies most of what was forked."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    job, where, *rest = sys.argv[1:]
    if job == "ask":
        sys.exit(ask(where, rest[0], rest[1:]))
    serve(where, rest)
    try:
        if sys.argv[0].endswith(".py"):
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            called = Path(sys.argv[0]).name
            (script,) = importlib.metadata.entry_points(group="console_scripts", name=called)
            sys.exit(script.load()())
    except SystemExit as stop:
        if not isinstance(stop.code, int | None):
            raise
        end(stop.code or 0)
    end(0)
