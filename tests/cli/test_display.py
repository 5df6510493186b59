"""Tables in a terminal: of every width, and nothing of them cut."""

import itertools
import re
import time
from collections.abc import Callable

import pytest

from perfed.cli import display
from perfed.cli.display import print_tables
from perfed.core.layout import Table
from perfed.runs.tables import FOOTNOTE, HEADER

Shown = Callable[[int], list[str]]
NUMBERS = ["31.0 ± 2.0", "31.5 ± 2.1", "33.6 ± 10.7", "17.4 ± 2.4", "144 k", "1.44 MB"]
TABLE = Table(
    "",
    HEADER,
    [["perfed-ckt (c=3, λ=2)", "personal", *NUMBERS], ["algorithms:[own],x=1", "global", *NUMBERS]],
    FOOTNOTE,
    names=2,
)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    """What a terminal of a width shows, line by line."""

    def show(width: int) -> list[str]:
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any output for a terminal
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(width))
        print_tables([TABLE])
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()

    return show


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (120, []),
        (104, []),
        (93, ["best test*"]),
        (80, ["best test*", "parameters"]),
        (66, ["best test*", "parameters", "worst 10 %"]),
    ],
)
def test_a_narrow_terminal_does_without_whole_columns(
    shown: Shown, width: int, left_out: list[str]
) -> None:
    lines = shown(width)
    columns = [n for n, title in enumerate(HEADER) if title not in left_out]
    for line, cells in zip(lines[1:4], [HEADER, *TABLE.rows], strict=True):
        assert re.split(r"  +", line.strip()) == [cells[n] for n in columns]
    assert max(map(len, lines)) <= width
    note = " ".join(" ".join(lines[4:]).split())
    assert note.endswith(f"space: {', '.join(left_out)}.") == bool(left_out)


def test_a_name_is_folded_at_spaces_before_anything_is_cut(shown: Shown) -> None:
    lines = shown(63)
    numbers = " ".join(kept(NUMBERS)).split()
    assert lines[2].split() == ["perfed-ckt", "(c=3,", "personal", *numbers]
    assert lines[3].strip() == "λ=2)"
    assert max(map(len, lines)) <= 63


def test_where_nothing_helps_the_table_is_as_wide_as_it_is(shown: Shown) -> None:
    lines = shown(30)
    for line, name in zip(
        lines[2:4], ["perfed-ckt (c=3, λ=2)", "algorithms:[own],x=1"], strict=True
    ):
        assert line.startswith(name)
        assert line.endswith("  ".join(kept(NUMBERS))[-7:])
        for number in kept(NUMBERS):
            assert number in line


def kept(numbers: list[str]) -> list[str]:
    """Those in columns that are never left out."""
    return [*numbers[:2], numbers[-1]]


def test_the_note_is_wrapped_once(shown: Shown) -> None:
    note = shown(70)[4:]
    last = next(number for number, line in enumerate(note) if not line.strip())
    for line, following in itertools.pairwise(note[:last]):
        assert len(line.rstrip()) + 1 + len(following.split()[0]) > 70


def test_a_log_never_stands_still(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal, something is said in every SILENCE seconds, and nothing after the end."""
    assert display.SILENCE <= 30
    monkeypatch.setattr(display, "SILENCE", 0.1)
    with display.Display() as shown:
        time.sleep(0.35)
        shown.begin("fedavg, seed 0: in round 2/9")
        time.sleep(0.35)
    said = capsys.readouterr().err.splitlines()
    assert "preparing; 0 s so far" in said
    assert any(re.match(r"fedavg, seed 0: in round 2/9; \d s so far", line) for line in said)
    assert 3 <= len(said) <= 7
    time.sleep(0.25)
    assert capsys.readouterr().err == ""


def test_the_time_of_a_run_is_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(key, value)
    with display.Display() as shown:
        assert shown._bars is not None
        name, facts = "perfed-ckt (c=2, λ=2), seed 0", "accuracy 86.1 %   142 kB"
        shown._bars.add_task(name, total=50, completed=50, facts=facts)
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    assert name in said
    assert f"{facts} -:--:--" in said  # no ellipsis
