"""The help of every command, in a terminal of 80 columns."""

from collections.abc import Iterator

import click
import pytest
import typer

from perfed.cli import app


def commands(
    group: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.fixture(params=COMMANDS, ids=" ".join)
def path(request: pytest.FixtureRequest) -> tuple[str, ...]:
    chosen: tuple[str, ...] = request.param
    return chosen


def shown(
    path: tuple[str, ...],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", None)  # CI asks for colours
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        app([*path, "--help"])
    return capsys.readouterr().out


def test_no_word_is_cut(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = set(shown(path, 80, monkeypatch, capsys).split())
    for parameter in COMMANDS[path].params:
        assert set((getattr(parameter, "help", None) or "").split()) <= words


def test_a_paragraph_is_broken_by_the_terminal_only(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line.strip() for line in shown(path, 500, monkeypatch, capsys).splitlines()]
    for paragraph in (COMMANDS[path].help or "").split("\n\n"):
        assert " ".join(paragraph.split()) in lines


def test_a_line_of_a_list_is_broken_by_the_terminal_only(path: tuple[str, ...]) -> None:
    """There Typer keeps the line breaks of the first paragraph."""
    assert "\n" not in (COMMANDS[path].help or "").split("\n\n")[0]
