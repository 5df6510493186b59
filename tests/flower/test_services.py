"""What is kept running: when it is started again, and with what; whose keys are registered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perfed.core.errors import ConfigError
from perfed.flower import services
from perfed.flower.initialise import initialise
from perfed.flower.kit import open_kit
from perfed.flower.services import (
    FIRST_WAIT,
    FORGETS,
    LONGEST_WAIT,
    WELL,
    Registrar,
    _Kept,
    keep_site,
)


def waits(kept: _Kept, until: float, lives: float, begins: float = 1000.0) -> list[float]:
    """It ends ``lives`` seconds after each start, for so many seconds."""
    found, now = [], begins
    while now < begins + until:
        kept.began, now = now, now + lives
        kept.lengthen_wait(now)
        found.append(kept.wait)
        now += kept.wait
    return found


def test_a_site_that_is_refused_tries_often_while_flower_may_still_forget_it() -> None:
    kept = _Kept("site-0", lambda: 0)
    assert set(waits(kept, FORGETS - 5, lives=1)) == {FIRST_WAIT}
    later = waits(kept, 3600, lives=1, begins=1001 + FORGETS)
    assert later[:6] == [4, 8, 16, 32, 60, 60]
    assert set(later[6:]) == {LONGEST_WAIT}


def test_what_has_run_well_begins_anew() -> None:
    kept = _Kept("site-0", lambda: 0)
    waits(kept, 3600, lives=1)
    assert kept.wait == LONGEST_WAIT
    assert waits(kept, 1, lives=WELL + 1) == [FIRST_WAIT]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """As the units of systemd have it: in a folder of another name than the kit's."""
    initialise(tmp_path / "trial", 2, tls=True, hosts=[])
    return open_kit(tmp_path / "trial" / "kits" / "site-1.tar.gz").rename(tmp_path / "site")


class Started:
    """Instead of processes."""

    def __init__(self) -> None:
        self.words: list[list[str]] = []

    def start(self, program: str, words: list[str], folder: Path) -> int:
        self.words.append(words)
        return len(self.words)

    def keep(self, name: str, start: Any) -> None:
        self.again = start
        start()


def test_a_site_is_started_again_at_a_port_that_is_free_then(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = iter([4001, 4002])
    monkeypatch.setattr(services, "_free_port", lambda: next(ports))
    started: Any = Started()
    keep_site(started, site)
    started.again()
    assert [words[words.index("--port") + 1] for words in started.words] == ["4001", "4002"]


def test_a_new_key_goes_by_the_sites_number_whatever_its_folder(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "key").unlink()
    keep_site(Started(), site)  # type: ignore[arg-type]
    assert "puts it into 'certificates' as site-1.pub" in capsys.readouterr().out


@pytest.mark.attack("key-of-another-kind")
def test_a_key_that_is_none_or_that_others_can_read_is_told_of(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (site / "key").chmod(0o640)
    keep_site(Started(), site)  # type: ignore[arg-type]
    assert "others on this machine may read" in capsys.readouterr().out
    (site / "key").chmod(0o600)
    keep_site(Started(), site)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    for content in (b"", b"nonsense", (site.parent / "trial/certificates/signer").read_bytes()):
        (site / "key").write_bytes(content)
        with pytest.raises(ConfigError, match="key is no key of a site: ECDSA"):
            keep_site(Started(), site)  # type: ignore[arg-type]


def test_a_key_that_cannot_be_registered_yet_is_registered_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its name; and what is wrong is said once."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(services, "time", SimpleNamespace(monotonic=lambda: clock.now))
    answers = [(1, "the superlink is\nnot there"), (1, "the superlink is\nnot there"), (0, "")]
    asked: list[str] = []

    def perform(words: list[str]) -> tuple[int, str]:
        asked.append(Path(words[-1]).name)
        return answers.pop(0)

    (tmp_path / "hospital.pub").touch()
    registrar = Registrar(perform, tmp_path)
    for clock.now in (0.0, 5.0, 35.0, 70.0, 105.0):
        registrar.look()
    assert asked == ["hospital.pub"] * 3
    said = [line.partition("Z ")[2] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "hospital.pub cannot be registered: the superlink is not there",
        "hospital.pub is registered: its site may come in",
    ]
