"""A site's ledger: what it was asked, what left, what was refused; and that nobody changed it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict

from perfed import cli
from perfed.core import tensorfile
from perfed.core.errors import RunError
from perfed.core.message import Message
from perfed.flower import client_app, codec
from perfed.flower.ledger import APPROVED, ASKED, HEAD, INTERRUPTED, LEDGER, LEFT, REFUSED, Ledger
from perfed.flower.plan import plan_hash
from perfed.flower.protocol import ROUND, Envelope
from tests.flower.setting import write_federation
from tests.flower.test_site import PLAN, header, join, play, site


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_federation(tmp_path / "federation")


def entries(folder: Path) -> list[dict[str, Any]]:
    contents = Ledger(folder).read()
    assert contents.faults == []
    return contents.entries


def written(folder: Path, count: int = 6) -> Ledger:
    ledger = Ledger(folder)
    for number in range(count):
        ledger.add(REFUSED, why=f"reason {number}")
    return ledger


@pytest.mark.attack("site-ledger")
def test_what_is_asked_and_what_leaves_is_in_it(folder: Path) -> None:
    here = site(folder)
    join(here)
    reply = play(here, 0)
    play(here, 99)
    first, approved, joined, asked, left, beyond, refused = entries(here.state)
    events = [entry["event"] for entry in (first, approved, joined, asked, left, beyond, refused)]
    assert events == [ASKED, APPROVED, LEFT, ASKED, LEFT, ASKED, REFUSED]
    assert first["plan"] == asked["plan"] == plan_hash(PLAN.to_mapping())
    assert (asked["kind"], asked["run"], asked["round"]) == (ROUND, "trial-1", 0)
    data = tensorfile.encode(reply.message.arrays)
    assert left["arrays"] == {"soft_decisions": "float32[30, 10]"}
    assert (left["bytes"], left["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    assert "numbers" in left["facts"]
    assert "round 99: this run has 9" in refused["why"]


@pytest.mark.attack("site-ledger")
def test_nothing_leaves_that_cannot_be_written_down(folder: Path) -> None:
    here = site(folder)
    join(here)
    (here.state / LEDGER).write_bytes(b"")
    answer = play(here, 0)
    assert "has lost lines, nothing is added" in answer.refusal
    assert not answer.message


@pytest.mark.attack(12)
def test_what_is_no_envelope_is_in_it_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what fails in the site's own code; and nobody writes lines of their own."""
    monkeypatch.setattr(client_app, "FlowerMessage", lambda content, reply_to: content)
    context = Context(1, 1, {"site": str(folder / "site-0.yaml")}, RecordDict(), {})
    records: Any = codec.encode(Envelope(header(site(folder), "x\n\x1b[2J" * 1000)))
    about = ConfigRecord({**records.config_records["about"], "facts": "[1]"})
    for content in (RecordDict({"about": about}), records):
        sent: Any = SimpleNamespace(content=content)
        client_app.answer(sent, context)
    monkeypatch.setattr("perfed.flower.site.Site._check", lambda *_: 1 / 0)
    client_app.answer(sent, context)
    odd, asked, refused, again, failed = entries(folder / "state-0")
    assert "not an envelope" in odd["why"]
    assert asked["kind"] == again["kind"] == refused["kind"]
    assert len(asked["kind"]) < 600
    assert asked["kind"].isprintable()
    assert failed["why"] == "failed with ZeroDivisionError; its log says more"


@pytest.mark.attack("disk-full-at-a-site")
def test_a_disk_that_fills_in_a_round_is_named_and_nothing_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site(folder)
    join(here)
    play(here, 0)
    write = tensorfile.write_atomically

    def full(path: Path, *pieces: tensorfile.Piece) -> None:
        if path.name == "checkpoint.safetensors":
            raise OSError(errno.ENOSPC, "where patient 7 is", str(path))
        write(path, *pieces)

    monkeypatch.setattr(client_app, "FlowerMessage", lambda content, reply_to: content)
    monkeypatch.setattr(tensorfile, "write_atomically", full)
    context = Context(1, 1, {"site": str(folder / "site-0.yaml")}, RecordDict(), {})
    centroids = Message(centroids=torch.full((2, 30, 10), 0.1))
    asked = Envelope(header(here, ROUND, 1), centroids)
    sent: Any = SimpleNamespace(content=codec.encode(asked))
    answer = codec.decode(cast(Any, client_app.answer(sent, context)))
    assert answer.refusal == "failed with OSError (No space left on device); its log says more"
    monkeypatch.undo()
    assert play(here, 1).message
    assert here.ledger.read().faults == []


def lines_of(folder: Path) -> list[bytes]:
    return (folder / LEDGER).read_bytes().splitlines(keepends=True)


def changed(lines: list[bytes], number: int) -> list[bytes]:
    lines[number - 1] = lines[number - 1].replace(b"reason", b"raisin")
    return lines


@pytest.mark.attack("site-ledger-changed", "site-ledger-truncated")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda lines: changed(lines, 3), "line 3 was changed: line 4 holds another hash"),
        (lambda lines: changed(lines, 1), "line 1 was changed: line 2 holds another hash"),
        (lambda lines: changed(lines, 6), f"line 6 was changed: {HEAD} holds another hash"),
        (lambda lines: lines[:2] + lines[3:], "line 3 was written as line 4, where line 3 must be"),
        (lambda lines: lines[1:], "line 1 was written as line 2, where line 1 must be"),
        (
            lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]],
            "line 3 was written as line 4, where line 3 must be",
        ),
        (lambda lines: lines[:3] + lines[2:], "line 4 was written as line 3, where line 4 must be"),
        (lambda lines: lines[:4], "after line 4, the last 2 of 6 are missing"),
        (lambda lines: [], "after line 0, the last 6 of 6 are missing"),
        (lambda lines: [*lines[:3], b"\xff\n", *lines[4:]], "line 4 was changed: line 5 holds"),
        (lambda lines: [*lines[:5], lines[5][:20]], "line 6 cannot be read"),
        (lambda lines: [*lines, lines[5]], "line 7 was written as line 6, where line 7 must be"),
        (lambda lines: [*lines[:2], b"[" * 10**5 + b"\n", *lines[2:]], "line 4 was written as"),
    ],
)
def test_a_change_is_found_and_named(
    change: Callable[[list[bytes]], list[bytes]],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written(tmp_path)
    (tmp_path / LEDGER).write_bytes(b"".join(change(lines_of(tmp_path))))
    monkeypatch.setattr(sys, "argv", ["perfed", "site", "ledger", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, wrong = capsys.readouterr()
    assert ended.value.code == 2
    assert f"{LEDGER}: {said}" in wrong
    assert wrong.count("\n") == 1
    assert "none changed" not in out


@pytest.mark.attack("site-ledger-truncated")
@pytest.mark.parametrize("head", [None, b"", b"[]", b'{"lines": 2}'])
def test_a_head_that_is_gone_or_odd_is_said(head: bytes | None, tmp_path: Path) -> None:
    ledger = written(tmp_path)
    (tmp_path / HEAD).unlink()
    if head is not None:
        (tmp_path / HEAD).write_bytes(head)
    assert f"{HEAD} is missing or cannot be read" in ledger.read().faults
    with pytest.raises(RunError, match="is missing or cannot be read"):
        ledger.add(REFUSED)


@pytest.mark.attack("site-ledger-killed")
@pytest.mark.parametrize("kept", [0, 1, 30, -1])
def test_a_line_cut_short_by_a_kill_is_said_by_the_next(kept: int, tmp_path: Path) -> None:
    """The line, or a part of it, is there; the head is of the line before."""
    ledger = written(tmp_path, 3)
    before = (tmp_path / HEAD).read_bytes()
    ledger.add(REFUSED, why="the last")
    *lines, last = lines_of(tmp_path)
    (tmp_path / LEDGER).write_bytes(b"".join(lines) + last[:kept])
    (tmp_path / HEAD).write_bytes(before)
    assert ledger.read().faults == []
    assert bool(ledger.read().notes) is (kept in (1, 30))
    ledger.add(REFUSED, why="after it")
    ledger.add(REFUSED, why="and on")
    assert entries(tmp_path)[-1]["why"] == "and on"
    said = [entry for entry in entries(tmp_path) if entry["event"] == INTERRUPTED]
    assert [[*entry["cut"]] for entry in said] == ([["4"]] if kept in (1, 30) else [])
    assert len(lines_of(tmp_path)) == {0: 5, -1: 6}.get(kept, 7)
    if said:  # the piece cannot be changed either
        torn = lines_of(tmp_path)
        torn[3] = b"x\n"
        (tmp_path / LEDGER).write_bytes(b"".join(torn))
        assert "line 4 was changed: line 5 holds another hash" in ledger.read().faults


@pytest.mark.attack("site-ledger-killed")
def test_killed_again_while_it_says_so(tmp_path: Path) -> None:
    """Two pieces in a row: both are named, with their hashes."""
    ledger = written(tmp_path, 2)
    with open(tmp_path / LEDGER, "ab") as file:
        file.write(b'{"line": 3, "wh\n{"line": 4, "event": "interr')
    ledger.add(REFUSED, why="after both")
    assert entries(tmp_path)[-2]["cut"].keys() == {"3", "4"}
    torn = lines_of(tmp_path)
    torn[2] = b"x\n"
    (tmp_path / LEDGER).write_bytes(b"".join(torn))
    assert ledger.read().faults == ["line 3 cannot be read"]


def test_a_line_is_added_without_reading_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = written(tmp_path)
    seen: list[bytes] = []
    monkeypatch.setattr("perfed.flower.ledger._parsed", seen.append)
    synced: list[int] = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), sync(handle))[1])
    ledger.add(REFUSED, why="one more")
    assert seen == []
    assert synced


def test_it_is_shown_as_a_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = site(folder)
    join(here)
    play(here, 0)
    for number in range(30):
        here.ledger.add(REFUSED, why=f"reason {number}\x1b[2J")

    def shown(*options: str) -> str:
        file = str(folder / "site-0.yaml")
        monkeypatch.setattr(sys, "argv", ["perfed", "site", "ledger", file, *options])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = shown("--all")
    assert "soft_decisions float32[30, 10]; 1" in text
    assert f"35 lines, none changed or missing; the last has {here.ledger.head().hash}" in text
    assert "\x1b" not in text
    assert "soft_decisions" not in shown()
    assert "5 earlier lines: --all shows them" in shown()


def test_no_ledger_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="a site has one once it was asked"):
        Ledger(tmp_path).read()


def test_what_comes_is_measured(folder: Path) -> None:
    here = site(folder)
    join(here)
    play(here, 0)
    message = Message(centroids=torch.full((2, 30, 10), 0.1))
    assert entries(here.state)[3]["bytes"] == len(tensorfile.encode(message.arrays))
    assert json.loads((here.state / HEAD).read_text())["lines"] == 5
