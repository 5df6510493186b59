"""Sets of images on disk: fetched once, checked on every way in.

    cifar10/images.npy     uint8, samples × 3 × 32 × 32
    cifar10/labels.npy     int64; absent where the source had none
    cifar10/manifest.json  where it came from, counts, checksums

A set is made in a hidden folder beside it and renamed when it is whole. So a set that is there is
whole, whatever was interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from perfed.core import locks
from perfed.core.errors import DataError, did_you_mean, shape_text
from perfed.core.tensorfile import sync_folder, write_atomically
from perfed.data.opening import file_content, open_file
from perfed.data.readers import Images, Layout, Progress, read_array, read_images, silent

MANIFEST, PIXELS, LABELS = "manifest.json", "images.npy", "labels.npy"
ARCHIVE = "archive"  # while it is being made
CHUNK = 1 << 18
PATIENCE = 60  # seconds without a byte from the server


@dataclass(frozen=True)
class Source:
    """Where an archive is published, and the checksum published with it."""

    url: str
    md5: str


@dataclass(frozen=True)
class ImageSet:
    """A published set of images: what it holds when whole, and how its copies look."""

    name: str
    source: Source
    classes: tuple[str, ...]
    layouts: tuple[Layout, ...]
    images: int = 60_000
    shape: tuple[int, ...] = (3, 32, 32)


@dataclass(frozen=True)
class Stored:
    """A set in the cache, as its manifest describes it."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def images(self) -> int:
        return int(self.manifest["images"])

    @property
    def source(self) -> str:
        return f"{self.manifest['source']['layout']}, {self.manifest['source']['from']}"

    def notes(self, wanted: ImageSet) -> list[str]:
        """What to know of the set; all of it may be meant."""
        notes, counts = [], self.manifest["by_class"]
        if self.manifest["source"].get("md5") == wanted.source.md5:
            notes.append("from the archive as published, by its checksum")
        if self.images != wanted.images:
            notes.append(f"{self.images:,} images: the whole set has {wanted.images:,}")
        if counts is None:
            notes.append("no labels: it can serve as an unlabeled public set only")
        elif len(set(counts)) > 1:
            notes.append(f"classes of {min(counts):,} to {max(counts):,} images")
        return notes


@dataclass(frozen=True)
class Arrays:
    """A set in memory, shared by all who load it: never to be written to."""

    pixels: np.ndarray
    labels: np.ndarray | None


def default_root() -> Path:
    """``$PERFED_DATA``, else perfed's part of the user's cache."""
    if own := os.environ.get("PERFED_DATA"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "perfed"


def find(name: str, root: Path) -> Stored | None:
    """The set called ``name`` in ``root``; its arrays are not looked at."""
    folder = root / name
    if not folder.exists():
        return None
    try:
        manifest = json.loads(file_content(folder / MANIFEST))
        stored = Stored(folder, manifest)
        known = bool(stored.images and stored.source) and "by_class" in manifest
        known &= PIXELS in manifest["checksums"]
    except (OSError, DataError, ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise DataError(f"{folder} is in the way: it is no set that perfed stored")
    return stored


def load(stored: Stored) -> Arrays:
    """The arrays, once per process, after a look at their checksums."""
    return _load(stored.folder.absolute(), json.dumps(stored.manifest["checksums"]))


@lru_cache(maxsize=2)
def _load(folder: Path, checksums: str) -> Arrays:
    arrays = {}
    for name, checksum in json.loads(checksums).items():
        try:
            if _checksum(folder / name, "sha256") != checksum:
                raise DataError(
                    f"{folder / name} is damaged: its checksum is not the recorded one; "
                    "remove the folder and get the set again"
                )
            arrays[name] = read_array(folder / name)
        except OSError as error:
            raise DataError(f"cannot read {folder / name}: {error.strerror}") from None
        arrays[name].setflags(write=False)
    return Arrays(arrays[PIXELS], arrays.get(LABELS))


def get(
    wanted: ImageSet, root: Path, origin: Path | None = None, progress: Progress = silent
) -> Stored:
    """Store ``wanted``, from ``origin`` or else from where it is published.

    What a killed predecessor left is removed. The set must not be there yet.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder, part = root / wanted.name, root / f".{wanted.name}.part"
    with _locked(root / f".{wanted.name}.lock"):
        shutil.rmtree(part, ignore_errors=True)
        if find(wanted.name, root) is not None:
            raise DataError(f"{folder} is there already")
        part.mkdir()
        try:
            taken = origin or download(wanted.source, part / ARCHIVE, progress)
            images = read_images(taken, wanted.layouts, progress)
            source = {
                "layout": images.layout,
                "from": str(origin.resolve()) if origin else wanted.source.url,
                "md5": _checksum(taken, "md5") if taken.is_file() else None,
            }
            (part / ARCHIVE).unlink(missing_ok=True)
            _write(wanted, images, source, part)
            os.rename(part, folder)
            sync_folder(root)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    stored = find(wanted.name, root)
    assert stored is not None
    return stored


def download(source: Source, target: Path, progress: Progress = silent) -> Path:
    """Fetch an archive; it is there afterwards only if its checksum is right."""
    done = 0
    try:
        with (
            # One of the addresses in cifar.py; what comes has a known checksum.
            urllib.request.urlopen(source.url, timeout=PATIENCE) as answer,  # noqa: S310
            open(target, "wb") as file,
        ):
            total = int(answer.headers.get("Content-Length") or 0)
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                done += len(chunk)
                progress("downloading", done, total)
    except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as e:
        if isinstance(e, urllib.error.HTTPError):
            e.close()  # it holds the answer
        reason = getattr(e, "reason", None) or e
        raise DataError(
            f"cannot download {source.url}: {reason} (with a copy at hand: --from PATH)"
        ) from None
    if done < total:
        raise DataError(f"{source.url}: the connection broke after {done:,} of {total:,} bytes")
    if (checksum := _checksum(target, "md5")) != source.md5:
        target.unlink()
        raise DataError(f"{source.url}: its md5 is {checksum}, must be {source.md5}: not used")
    return target


def _write(wanted: ImageSet, images: Images, source: dict[str, Any], folder: Path) -> None:
    named = source["from"]
    if images.pixels.shape[1:] != wanted.shape:
        theirs, ours = (shape_text(s) for s in (images.pixels.shape[1:], wanted.shape))
        raise DataError(f"{named}: images of {theirs}; {wanted.name} has {ours}")
    arrays, by_class = {PIXELS: images.pixels}, None
    if images.labels is not None:
        arrays[LABELS] = labels = _official_labels(wanted, images, named)
        by_class = np.bincount(labels, minlength=len(wanted.classes)).tolist()
    manifest = {
        "name": wanted.name,
        "source": source,
        "images": len(images.pixels),
        "by_class": by_class,
        "checksums": {name: _save(folder / name, array) for name, array in arrays.items()},
        "stored": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_atomically(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def _official_labels(wanted: ImageSet, images: Images, named: str) -> np.ndarray:
    """The labels as the published set numbers them, also where some classes are absent."""
    assert images.labels is not None
    labels = images.labels
    if images.names:
        numbers = {name: number for number, name in enumerate(wanted.classes)}
        numbers |= {name: int(name) for name in images.names if name.isdecimal()}
        for name in images.names:
            if name not in numbers:
                hint = did_you_mean(name, wanted.classes) if len(wanted.classes) < 20 else ""
                raise DataError(f"{named}: '{name}' is no class of {wanted.name}{hint}")
        labels = np.array([numbers[name] for name in images.names])[labels]
    wrong = np.flatnonzero((labels < 0) | (labels >= len(wanted.classes)))
    if len(wrong):
        raise DataError(
            f"{named}: label {labels[wrong[0]]} of image {wrong[0]} is out of range: "
            f"{wanted.name} has 0 … {len(wanted.classes) - 1}"
        )
    return labels


def _save(path: Path, array: np.ndarray) -> str:
    """Write an array through to the disk; returns the file's checksum."""
    with open(path, "wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())
    return _checksum(path, "sha256")


def _checksum(path: Path, kind: str) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(
            file, lambda: hashlib.new(kind, usedforsecurity=False)
        ).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(locks.locked(path))
        except TimeoutError:
            raise DataError(f"another process is getting this set ({path})") from None
        yield
