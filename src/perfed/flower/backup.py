"""A site's state in one file, and back: before an upgrade, and after a disk is lost."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import tempfile
import time
from pathlib import Path

from packaging.version import Version

import perfed
from perfed.core import locks
from perfed.core.errors import RunError
from perfed.core.tensorfile import write_atomically
from perfed.flower.settings import read_site

VERSION = "perfed-version"
STATE = "state"
LOCK = ".lock"


def state_of(site: Path) -> Path:
    return site.absolute().parent / read_site(site).state


def backup(site: Path, file: Path) -> int:
    """All of the state as it is between two tasks; returns how many files. A file that is there
    already is never replaced."""
    state = state_of(site)
    if file.exists():
        raise RunError(f"{file} exists already: choose another")
    if not state.is_dir():
        raise RunError(f"no {state}: this site has done nothing yet")
    content = io.BytesIO()
    task_ends_first = locks.locked(state / LOCK, patience=None)
    with task_ends_first, tarfile.open(fileobj=content, mode="w:gz") as archive:
        version = perfed.__version__.encode()
        entry = tarfile.TarInfo(VERSION)
        entry.size = len(version)
        archive.addfile(entry, io.BytesIO(version))
        paths = [path for path in sorted(state.rglob("*")) if path.name != LOCK]
        if links := [path for path in paths if path.is_symlink()]:
            raise RunError(
                f"{links[0]} is a link, and a backup would not hold what it leads to: put that in "
                "its place; the whole folder may be anywhere ('state' in site.yaml)"
            )
        for path in paths:
            archive.add(path, f"{STATE}/{path.relative_to(state)}", recursive=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content.getvalue(), mode=0o600)  # models, and the site's secret name
    return sum(path.is_file() for path in paths)


def restore(site: Path, file: Path) -> Path | None:
    """The state as it was; returns where the one is that was here."""
    state = state_of(site)
    state.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{state.name}.", dir=state.parent))
    try:
        with tarfile.open(file) as archive:
            archive.extractall(draft, filter="data")
        is_folder = (draft / STATE).is_dir() and not (draft / STATE).is_symlink()
        if not is_folder or not (draft / VERSION).is_file():
            raise RunError(f"{file} is no backup of a site: 'perfed site backup' makes one")
        made_by = (draft / VERSION).read_text("utf-8")
        if Version(made_by) > Version(perfed.__version__):
            raise RunError(
                f"{file} was made by perfed {made_by}, here is {perfed.__version__}: "
                f"install perfed {made_by} first, or restore an older backup"
            )
        replaced = None
        if state.exists():
            try:
                with locks.locked(state / LOCK):
                    replaced = state.with_name(f"{state.name}.replaced-{time.time_ns()}")
                    os.replace(state, replaced)
            except TimeoutError:
                raise RunError("the site is at work: stop it first") from None
        os.replace(draft / STATE, state)
        return replaced
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise RunError(f"{file} is no backup of a site: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
