"""``perfed federation try``: a whole federation on this machine, with the pieces of a real one."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from perfed.core.errors import RunError
from perfed.core.layout import Table
from perfed.flower.initialise import initialise
from perfed.flower.kit import KITS, open_kit, write_kits
from perfed.flower.saying import LOG
from perfed.flower.services import (
    HOME,
    LOOPBACK,
    Services,
    keep_gate,
    keep_site,
    keep_superlink,
    services,
)
from perfed.flower.site import REPORT
from perfed.runs.directory import RunDirectory
from perfed.runs.result import Result

NOTE = (
    "Test accuracy of each site's own model. The sites are of two kinds by turns, each with half "
    "of the classes and few samples. Who has no other of its kind, as site-1 of three, cannot gain."
)


def try_out(sites: int, rounds: int, keep: Path | None) -> None:
    """Superlink, sites, a run, the table; then all is stopped, and deleted unless it is kept."""
    with _folder(keep) as folder:
        _say(f"writing a federation of {sites} sites to {folder}")
        began = time.monotonic()
        initialise(folder / "trial", sites, tls=False, hosts=[], port=_free_port(), rounds=rounds)
        coordinator, gate = folder / "trial", _free_port()
        write_kits(coordinator, f"{LOOPBACK}:{gate}")
        _say("loading torch, perfed and Flower, once for all of them")
        with services(coordinator / HOME) as kept:
            log = open(folder / "flower.log", "ab", buffering=0)  # noqa: SIM115 - until all end
            kept.output = log.fileno()
            _say("starting the coordinator's superlink and gate")
            keep_superlink(kept, coordinator)
            keep_gate(kept, coordinator, LOOPBACK, gate)
            for kit in sorted((coordinator / KITS).iterdir()):
                keep_site(kept, open_kit(moved(kit, folder)))
            _say(f"starting {sites} sites, each from its kit, and the run")
            start_run(kept, coordinator)
            follow(kept, coordinator / "run", folder / "flower.log")
            _say("stopping everything")
        result = Result(coordinator / "run")
        _say(f"done in {time.monotonic() - began:.0f} s")
        print(f"\n{result.table()}\n\n{_gains(folder)}")
        if keep is not None:
            print(f"\nkept: {keep}; 'perfed report {keep / 'trial' / 'run'}' draws it")


def _say(line: str) -> None:
    print(line, flush=True)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """A new one, which goes away however this ends; or a named one, which stays."""
    if keep is not None:
        if keep.exists():
            raise RunError(f"{keep} exists already: choose another")
        keep.mkdir(parents=True)
        yield keep.absolute()
        return
    folder = Path(tempfile.mkdtemp(prefix="perfed-try-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def moved(kit: Path, folder: Path) -> Path:
    """As if it had been sent to the site's machine."""
    place = folder / "sites"
    place.mkdir(exist_ok=True)
    return Path(shutil.copy(kit, place / kit.name))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start_run(kept: Services, coordinator: Path) -> None:
    code, said = kept.perform("perfed", ["federation", "start", "--no-stream"], coordinator)
    if code:
        raise RunError(f"the run does not start: {said.strip().splitlines()[-1:]}")


def follow(kept: Services, run: Path, log: Path, show: Callable[[str], None] = _say) -> None:
    """Show what the coordinator says, until its run is over."""
    seen, worked, directory = 0, False, RunDirectory(run)
    while True:
        works = directory.in_use()
        over = directory.finished or bool(directory.failure)
        text = (run / LOG).read_text("utf-8") if (run / LOG).is_file() else ""
        complete = text[: text.rfind("\n") + 1].splitlines()
        for line in complete[seen:]:
            said = json.loads(line)["line"]
            if "\n" not in said:  # the table comes at the end
                show(f"  {said}")
        seen = len(complete)
        if over:
            break
        if worked and not works and not directory.finished:
            raise RunError(f"the coordinator's process is gone; Flower's own log is {log}")
        worked = works
        kept.tend(0.3)
    if directory.failure:
        raise RunError(f"{directory.failure} (Flower's own log: {log})")


def _gains(folder: Path) -> str:
    """What each site has, with the federation and alone; from the sites' own reports."""
    rows = []
    for site in sorted((folder / "sites").glob("site-*/")):
        for report in site.glob(f"state*/*/{REPORT}"):
            last = json.loads(report.read_text("utf-8").splitlines()[-1])
            accuracies = last["test_accuracy"], last.get("alone_test_accuracy")
            shown = ["" if n is None else f"{100 * n:.1f} %" for n in accuracies]
            gain = f"{100 * last['gain']:+.1f}" if "gain" in last else ""
            rows.append([site.name, *shown, gain])
    header = ["site", "with the federation", "alone", "gain in points"]
    return Table("", header, rows, NOTE, names=1).text()
