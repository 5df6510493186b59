"""What runs for days: the coordinator's superlink and gate, and a site's supernode.

One process keeps them (:mod:`perfed.flower.warm`). It starts what ends again, and when it is
stopped, by Ctrl-C or systemd, all of them end.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

from perfed.config import read_mapping
from perfed.core.errors import ConfigError, one_line
from perfed.flower.asking import private_key
from perfed.flower.kit import AUTHORITY, KEY, SITE, TRUSTED, make_key, read_link, superlink_address
from perfed.flower.saying import say
from perfed.flower.settings import read_coordinator
from perfed.flower.signing import run_nothing_else
from perfed.flower.upkeep import START_AGAIN
from perfed.flower.warm import Warm
from perfed.runs.directory import RunDirectory

DATABASE = "superlink.db"
HOME = "flwr-home"
FIRST_WAIT, LONGEST_WAIT = 2.0, 60.0  # seconds until what has ended is started again
FORGETS = 120.0
"""Seconds for which the wait stays short. Flower refuses a site with a key until it has noticed,
after 50 to 60 seconds, that the one that was killed is gone: a site that waits longer and longer
would miss rounds after that."""
WELL = 300.0  # seconds after which a start counts as one that went well
LOOKS = 5.0  # seconds between two looks for what is new
TRIES_AGAIN = 30.0  # seconds until a key that was not taken is registered again
LOOPBACK, ANYWHERE = "127.0.0.1", "0.0.0.0"  # noqa: S104 - sites come from outside


WAITS = {3: 1.0, 0.5: 0.1}
"""Seconds that Flower's supernode waits when there is nothing to do, and for its own program's
answer; and what is waited here instead."""


def wait_less() -> None:
    """In this process and those that it forks. Flower has no setting for it."""
    module = importlib.import_module("flwr.supernode.start_client_internal")

    def sleep(seconds: float) -> None:
        time.sleep(WAITS.get(seconds, seconds))

    module.time = SimpleNamespace(sleep=sleep)  # type: ignore[attr-defined]


class Stopped(Exception):
    """Somebody asks this process to end."""


@dataclass
class _Kept:
    name: str
    start: Callable[[], int]
    pid: int = 0
    began: float = 0.0
    failing: float = 0.0
    """Since when it ends again and again."""
    wait: float = FIRST_WAIT
    again: float = 0.0

    def lengthen_wait(self, now: float) -> None:
        """It has ended: how long until it is started again."""
        if not self.failing or now - self.began > WELL:
            self.failing, self.wait = now, FIRST_WAIT
        elif now - self.failing > FORGETS:
            self.wait = min(2 * self.wait, LONGEST_WAIT)


class Services:
    """Programs that are kept running."""

    def __init__(self, home: Path) -> None:
        if not hasattr(os, "fork"):
            raise ConfigError(
                "this system cannot fork a process: start Flower's own programs instead, as in "
                "docs/federation.md"
            )
        self.warm = Warm()
        run_nothing_else()
        wait_less()
        self.environment = self.warm.environment(home)
        self.output: int | None = None
        """A file for what Flower's programs say; without one, they write where this one does."""
        self.asked_to_stop = ""
        """The signal that did. An exception in a signal's handler can come where nobody sees it."""
        self._kept: list[_Kept] = []

    def start(self, program: str | Callable[[], object], words: list[str], folder: Path) -> int:
        return self.warm.start(program, words, folder, self.environment, self.output)

    def keep(self, name: str, start: Callable[[], int]) -> None:
        """Start it now, and again whenever it ends, later and later where it ends at once."""
        kept = _Kept(name, start)
        self._kept.append(kept)
        self._start(kept)

    def _start(self, kept: _Kept) -> None:
        kept.pid, kept.began, kept.again = kept.start(), time.monotonic(), 0.0

    def tend(self, seconds: float) -> None:
        """Serve for so long."""
        ends = time.monotonic() + seconds
        while (left := ends - time.monotonic()) > 0:
            self._turn(min(left, 0.5))

    def _turn(self, seconds: float) -> dict[int, int]:
        ended = self.warm.turn(seconds)
        if self.asked_to_stop:
            raise Stopped(self.asked_to_stop)
        now = time.monotonic()
        for kept in self._kept:
            if kept.pid in ended:
                kept.lengthen_wait(now)
                code, kept.pid, kept.again = ended[kept.pid], 0, now + kept.wait
                say(f"{kept.name} {_end(code)}; it is started again in {kept.wait:g} s")
            elif kept.again and now >= kept.again:
                self._start(kept)
        return ended

    def stop(self, name: str) -> None:
        """One of them, for good."""
        for kept in [kept for kept in self._kept if kept.name == name]:
            self._kept.remove(kept)
            self.warm.stop([kept.pid])

    def pid(self, name: str) -> int:
        """0 where it does not run."""
        return next(kept.pid for kept in self._kept if kept.name == name)

    def perform(self, program: str, words: list[str], folder: Path) -> tuple[int, str]:
        """One program, to its end: its exit code, and what it said."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            pid = self.warm.start(program, words, folder, self.environment, output.fileno())
            while pid not in (ended := self._turn(0.5)):
                pass
            output.seek(0)
            return ended[pid], output.read()

    def close(self) -> None:
        # The superlink, which is the first, at last: to it sites can say that they leave.
        self.warm.stop([kept.pid for kept in self._kept[1:]])
        self.warm.close()


def _end(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}" + (", and says above why" if code else "")


@contextmanager
def services(home: Path) -> Iterator[Services]:
    """Until a signal; then nothing is left running."""

    made = Services(home)

    def stop(number: int, _: FrameType | None) -> None:
        made.asked_to_stop = signal.Signals(number).name

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield made
    finally:
        made.close()
        for number, handler in before.items():
            signal.signal(number, handler)


# The coordinator.


def superlink_words(folder: Path) -> list[str]:
    host, _, port = superlink_address(folder).rpartition(":")
    words = ["--host", host, "--port", port, "--disable-runtime-dependency-installation"]
    words += ["--database", DATABASE]
    certificates = Path("certificates")
    if not (folder / certificates).is_dir():
        return [*words, "--insecure"]
    words += ["--ssl-ca-certfile", str(certificates / AUTHORITY)]
    words += ["--ssl-certfile", str(certificates / "server.crt")]
    return [
        *words,
        "--ssl-keyfile",
        str(certificates / "server.key"),
        "--enable-supernode-auth",
    ]


def keep_superlink(kept: Services, folder: Path) -> None:
    """Until it listens."""
    words, address = superlink_words(folder), superlink_address(folder)
    if _listens(address):
        raise ConfigError(
            f"something listens at {address} already: stop it, or give the federation another "
            f"port in {folder / HOME / 'config.toml'}"
        )
    kept.keep(
        "the superlink",
        lambda: kept.start("flower-superlink", words, folder),
    )
    while not _listens(address):
        kept.tend(0.1)


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), 1):
        return True
    return False


def check_gate(folder: Path, host: str, port: int) -> str:
    """The address where sites come in: with TLS any, else this machine's own. It must be free."""
    tls = (folder / "certificates").is_dir()
    if not tls and host not in ("", LOOPBACK):
        raise ConfigError("without TLS sites come in from this machine alone", "--host")
    host = host or (ANYWHERE if tls else LOOPBACK)
    if _listens(here := _seen_from_here(host, port)):
        raise ConfigError(
            f"something listens at {here} already: stop it, or choose another port and pack the "
            "kits anew ('perfed federation kits --address HOST:PORT')",
            "--port",
        )
    return host


def _seen_from_here(host: str, port: int) -> str:
    return f"{LOOPBACK if host == ANYWHERE else host}:{port}"


def keep_gate(kept: Services, folder: Path, host: str, port: int) -> None:
    """Where sites come in, until it listens."""
    from perfed.flower.gate import serve as open_gate

    host, link, run = (
        check_gate(folder, host, port),
        superlink_address(folder),
        run_directory(folder),
    )
    certificates = folder / "certificates" if (folder / "certificates").is_dir() else None
    kept.keep(
        "the gate",
        lambda: kept.start(lambda: open_gate(link, certificates, run, host, port), [], folder),
    )
    while not _listens(_seen_from_here(host, port)):
        kept.tend(0.1)


def run_directory(folder: Path) -> Path:
    return folder / read_coordinator(folder / "coordinator.yaml").directory


def serve(folder: Path, host: str, port: int) -> None:
    """The coordinator's side, until it is stopped."""
    folder = folder.absolute()
    check_gate(folder, host, port)  # says what is wrong before anything is loaded
    with suppress(Stopped), services(folder / HOME) as kept:
        keep_superlink(kept, folder)
        say(f"the superlink listens at {superlink_address(folder)}, for this machine alone")
        keep_gate(kept, folder, host, port)
        say(f"sites come in at port {port}")
        registrar = Registrar(
            lambda words: kept.perform("flwr", words, folder), folder / "certificates"
        )
        watch = DeathWatch(run_directory(folder))
        while True:
            registrar.look()
            watch.look()
            kept.tend(LOOKS)


class DeathWatch:
    """Says when the process that worked on a run is gone and the run is not over."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._worked = False

    def look(self) -> None:
        directory = RunDirectory(self._run)
        works = directory.in_use()
        if self._worked and not works and not directory.finished:
            why = directory.failure or "its process is gone"
            say(f"WARNING: nobody is at work on {self._run}: {why}; {START_AGAIN}")
        self._worked = works


class Registrar:
    """Registers the public keys of sites, ``certificates/*.pub``, also those that come while it
    runs. One that the superlink does not take is tried again: it may just be starting."""

    def __init__(self, perform: Callable[[list[str]], tuple[int, str]], certificates: Path) -> None:
        self._perform = perform
        self._certificates = certificates
        self._done: dict[Path, float] = {}
        self._again: dict[Path, float] = {}
        self._said: dict[Path, str] = {}

    def look(self) -> None:
        for key in sorted(self._certificates.glob("*.pub")):
            with suppress(FileNotFoundError):  # taken away meanwhile
                changed = key.stat().st_mtime
                if self._done.get(key) != changed and time.monotonic() >= self._again.get(key, 0):
                    self._register(key, changed)

    def _register(self, key: Path, changed: float) -> None:
        code, said = self._perform(["supernode", "register", str(key)])
        line = f"{key.name} is registered: its site may come in"
        if code == 0 or "already" in said:
            self._done[key] = changed
        else:
            self._again[key] = time.monotonic() + TRIES_AGAIN
            line = f"{key.name} cannot be registered: {one_line(' '.join(said.split()))}"
        if self._said.get(key) != line and "already" not in said:
            say(line)
        self._said[key] = line


# A site.


def supernode_words(folder: Path) -> list[str]:
    link = read_link(folder)
    words = ["--superlink", link.superlink, "--node-config", f'site="{SITE}"']
    if not link.tls:
        return [*words, "--insecure"]
    if not (folder / AUTHORITY).is_file():
        raise ConfigError(f"no {AUTHORITY} in {folder}: the coordinator's kit has it")
    if (folder / KEY).is_file():
        private_key(folder / KEY)  # or Flower would end again and again
    words += ["--root-certificates", AUTHORITY, "--auth-supernode-private-key", KEY]
    return words + (["--trusted-entities", TRUSTED] if (folder / TRUSTED).is_file() else [])


def _free_port() -> int:
    """For what Flower's programs at the site say to each other."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def keep_site(kept: Services, folder: Path) -> None:
    words = supernode_words(folder)
    if read_link(folder).tls:
        if made := make_key(folder, _client(folder)):
            say(made)
        if warning := open_to_others(folder / KEY):
            say(warning)

    def start() -> int:  # each time at a port that is free then: another program may have the last
        return kept.start("flower-supernode", [*words, "--port", str(_free_port())], folder)

    kept.keep(folder.name, start)


def _client(folder: Path) -> Any:
    return read_mapping(folder / SITE).get("client", 0)


def open_to_others(key: Path) -> str:
    """Why a private key is not private; empty where it is."""
    if os.name != "posix" or not key.stat().st_mode & 0o077:
        return ""
    return f"WARNING: others on this machine may read {key}, and be this site: chmod 600 {key}"


def start_site(folder: Path) -> None:
    """A site, until it is stopped."""
    folder = folder.absolute()
    supernode_words(folder)  # says what is wrong before anything is loaded
    with suppress(Stopped), services(folder / HOME) as kept:
        say(f"{folder.name} looks for the federation at {read_link(folder).superlink}")
        keep_site(kept, folder)
        while True:
            kept.tend(LOOKS)
