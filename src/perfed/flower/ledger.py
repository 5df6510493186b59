"""A site's ledger: what it was asked, what left it, what it refused and why.

Two files in the site's ``state``. ``ledger.jsonl`` only grows; each line holds the hash of the line
before. ``ledger.head`` says how many lines there are and the hash of the last: without it, nobody
could see that lines are missing at the end.

A process may be killed while it writes a line. What it has written stays; the next line says which
one was cut short, and holds its hash.

Nothing is secret in the hashes: whoever may write in the folder can write both files anew. Who
notes the hash of the last line elsewhere finds that out, too.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from perfed.core import locks, tensorfile
from perfed.core.errors import RunError, printable
from perfed.core.layout import Table
from perfed.core.message import Message

LEDGER, HEAD = "ledger.jsonl", "ledger.head"
NOTHING = "0" * 64  # what the first line was written after
ASKED, LEFT, REFUSED, APPROVED, TOLD = "asked", "left", "refused", "approved", "told"
INTERRUPTED = "interrupted"
NEWEST = 30  # lines that are shown
LOOK = (
    "'perfed site ledger SITE.YAML' says where. To begin another, move ledger.jsonl and "
    "ledger.head away"
)


@dataclass(frozen=True)
class Head:
    """The end of a ledger."""

    lines: int = 0
    hash: str = NOTHING
    size: int = 0

    def after(self, line: bytes) -> Head:
        return Head(self.lines + 1, _hash(line), self.size + len(line) + 1)


class Ledger:
    """The ledger in this folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER
        self._head = folder / HEAD

    def add(self, event: str, **what: Any) -> None:
        """One line more; it is on the disk when this returns."""
        try:
            with self._opened() as file:
                head, text, cut = self._end(file)
                if cut:
                    why = "the writing of these lines was interrupted"
                    line = _line(head, INTERRUPTED, {"why": why, "cut": cut})
                    head, text = head.after(line), text + line + b"\n"
                line = _line(head, event, what)
                file.write(text + line + b"\n")
                file.flush()
                os.fsync(file.fileno())
                self._write(head.after(line))
        except OSError as error:
            raise RunError(f"cannot write {self.path}: {error.strerror}") from None

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        """For this process alone."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_name(f".{self.path.name}.lock")
        with locks.locked(lock, patience=None), open(self.path, "a+b") as file:
            yield file

    def _end(self, file: BinaryIO) -> tuple[Head, bytes, dict[str, str]]:
        """Where the next line goes, what must be written before it, and which lines were cut short
        since the head was written. Reads no more than what came after the head."""
        size = file.seek(0, os.SEEK_END)
        if not size and not self._head.exists():
            self._write(Head())  # first, so that a ledger without a head has lost it
        head = self.head()
        if size < head.size:
            raise RunError(f"{self.path} has lost lines, nothing is added: {LOOK}")
        file.seek(head.size)
        *lines, rest = file.read().split(b"\n")
        cut = {}
        for line in [*lines, *([rest] if rest else [])]:
            entry = _parsed(line)
            if entry is None:
                cut[str(head.lines + 1)] = _hash(line)
            elif (entry.get("line"), entry.get("previous")) != (head.lines + 1, head.hash):
                raise RunError(f"{self.path} was changed, nothing is added: {LOOK}")
            head = head.after(line)
        return head, b"\n" if rest else b"", cut

    def head(self) -> Head:
        try:
            values = json.loads(self._head.read_bytes())
            return Head(int(values["lines"]), str(values["hash"]), int(values["size"]))
        except (FileNotFoundError, *tensorfile.MALFORMED):
            raise RunError(f"{self._head} is missing or cannot be read: {LOOK}") from None

    def _write(self, head: Head) -> None:
        tensorfile.write_atomically(self._head, json.dumps(asdict(head)).encode())

    def read(self) -> Contents:
        """All of it, checked."""
        if not self.path.is_file() and not self._head.is_file():
            raise RunError(f"no ledger in {self.path.parent}: a site has one once it was asked")
        contents = Contents()
        try:
            head = self.head()
        except RunError:
            head = None
            contents.faults.append(f"{HEAD} is missing or cannot be read")
        if self.path.is_file():
            with open(self.path, "rb") as file:
                for line in file:
                    contents.take(line, head)
        contents.end(head)
        return contents


@dataclass
class Contents:
    """A ledger that is read line by line, and what is wrong with it."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lines: int = 0
    hash: str = NOTHING
    """Of the last line."""
    _cut: dict[str, str] = field(default_factory=dict)
    _last: int = 0  # the number that the last line has, which is its own where nothing is wrong

    def take(self, raw: bytes, head: Head | None) -> None:
        self.lines += 1
        line = raw.removesuffix(b"\n")
        entry = _parsed(line)
        if entry is None:
            self._cut[str(self.lines)] = _hash(line)
            self._last += 1
        else:
            self._check(entry)
            self.entries.append(entry)
        self.hash = _hash(line)
        if head and self._last == head.lines and self.hash != head.hash and entry is not None:
            self._fault(self.lines, f"was changed: {HEAD} holds another hash")

    def _check(self, entry: dict[str, Any]) -> None:
        number = entry.get("line")
        if number != self._last + 1:
            self._fault(
                self.lines,
                f"was written as line {number}, where line {self._last + 1} must be: "
                "lines were deleted or moved",
            )
        elif entry.get("previous") != self.hash:
            self._fault(self.lines - 1, f"was changed: line {self.lines} holds another hash")
        self._last = number if isinstance(number, int) else self._last + 1
        if entry.get("event") == INTERRUPTED and isinstance(entry.get("cut"), dict):
            for cut, hash in entry["cut"].items():
                if self._cut.get(cut) == hash:
                    del self._cut[cut]

    def end(self, head: Head | None) -> None:
        for number in self._cut:
            if head and int(number) > head.lines:
                self.notes.append(f"line {number} was cut short; the next one will say so")
            else:
                self._fault(int(number), "cannot be read")
        if head and self._last < head.lines:
            missing = head.lines - self._last
            self.faults.append(
                f"after line {self.lines}, the last {missing} of {head.lines} are missing: "
                f"{HEAD} knows of them"
            )

    def _fault(self, line: int, what: str) -> None:
        self.faults.append(f"line {line} {what}")

    def check(self, path: Path) -> None:
        if self.faults:
            more = f" (and {len(self.faults) - 1} more)" if len(self.faults) > 1 else ""
            raise RunError(f"{path}: {self.faults[0]}{more}")

    def table(self, newest: int | None = NEWEST) -> Table:
        entries = self.entries[-newest:] if newest else self.entries
        header = ["line", "time", "event", "task", "round", "run", "what"]
        hidden = len(self.entries) - len(entries)
        notes = [f"{hidden} earlier lines: --all shows them"] * (hidden > 0) + self.notes
        return Table("", header, [_row(e) for e in entries], "; ".join(notes), names=len(header))


def described(message: Message, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What leaves with an answer: every array with type and shape, the bytes as they are sent and
    their hash, and the names of the facts."""
    data = tensorfile.encode_message(message.arrays) if message.arrays else b""
    arrays = {
        name: f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for name, tensor in message.arrays.items()
    }
    what: dict[str, Any] = {"arrays": arrays, "bytes": len(data), "facts": sorted(facts)}
    return what | ({"sha256": _hash(data)} if data else {})


def _line(head: Head, event: str, what: Mapping[str, Any]) -> bytes:
    about = {"line": head.lines + 1, "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
    entry = {**about, "event": event, **what, "previous": head.hash}
    return json.dumps(entry, separators=(",", ":")).encode()


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _row(entry: Mapping[str, Any]) -> list[str]:
    columns = [entry.get(name, "") for name in ("line", "time", "event", "kind", "round", "run")]
    return [*map(_shown, columns), "; ".join(_what(entry))]


def _what(entry: Mapping[str, Any]) -> Iterator[str]:
    if "plan" in entry:
        yield f"plan {_shown(entry['plan'])[:12]}"
    if isinstance(entry.get("arrays"), dict):
        yield from (_shown(f"{name} {kind}") for name, kind in entry["arrays"].items())
    if entry.get("bytes"):
        yield f"{_shown(entry['bytes'])} bytes"
    if "sha256" in entry:
        yield f"sha256 {_shown(entry['sha256'])[:12]}"
    if entry.get("facts"):
        yield f"facts {_shown(entry['facts'])}"
    if entry.get("changes"):
        yield _shown(entry["changes"])
    if "why" in entry:
        yield _shown(entry["why"])
    if "cut" in entry:
        yield f"lines {_shown([*entry['cut']])}"


def _shown(value: Any) -> str:
    """A ledger may have been changed by anybody: its text is shown as text."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return printable(text)
