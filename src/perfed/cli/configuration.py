"""``perfed init`` and ``perfed explain``."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from perfed import explain as explanation
from perfed import starter
from perfed.core.errors import ConfigError


def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A key (training.steps, algorithm.clusters), a group of keys (models), a name "
            "(perfed-ckt), a preset (digits-groups), or file.py:Name; without one, all keys."
        ),
    ] = None,
) -> None:
    """Say what a key of a configuration means, what it may be, and its default."""
    lines = explanation.overview() if key is None else explanation.explain(key)
    if sys.stdout.isatty() and not explanation.is_file_of_ours(key):
        width = shutil.get_terminal_size().columns
        lines = [piece for line in lines for piece in _folded(line, width)]
    print("\n".join(lines))


def _folded(line: str, width: int) -> list[str]:
    """A line that is too long goes on two places further in; no word is broken."""
    further = " " * (len(line) - len(line.lstrip()) + 2)
    pieces = textwrap.wrap(
        line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )
    return pieces or [line]


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("experiment.yaml"),
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="A folder of images by class (or one such folder for each client), a .csv, .npz "
            "or .npy file, file.py:Dataset, hub:NAME (Hugging Face), or digits.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="The label column of a .csv file.")
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option("--clients", min=1, help="Number of clients to divide the data among."),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", "-a", help="One, or several with commas.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="One, or several with commas.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask questions.")] = False,
) -> None:
    """Write a commented configuration to start from, after a few questions."""
    if file.exists():
        raise ConfigError(f"{file} exists already: choose another name", "init")

    def asked(given: str | None, question: str, default: str) -> str:
        if given is not None or yes:
            return given or default
        try:
            return str(typer.prompt(question, default=default))
        except typer.Abort:
            if sys.stdin.isatty():  # Ctrl-C, or Ctrl-D
                raise
            message = f'"{question}" was not answered: --yes takes what stands in brackets'
            raise ConfigError(message, "init") from None

    source = starter.recognise(asked(data, starter.DATA_QUESTION, "digits"))
    if source.get("name") == "csv":
        guess = starter.likely_target(source)
        source["target"] = asked(target, "Which column is the label?", guess)
        if target is None and yes:
            print(f"label: column '{guess}', a guess; --target names another")
        if ignored := starter.names_of_rows(source):
            source["ignore"] = ignored
            print(f"left out, as ids or dates: {', '.join(ignored)} (data.ignore)")
    start = starter.Start.look(source)
    if start.named_clients:
        number = start.named_clients
    else:
        given = None if clients is None else str(clients)
        text = asked(given, "How many clients?", str(start.likely_clients()))
        number = starter.whole_number(text)
    algorithms = asked(algorithm, "Which algorithms?", starter.ALGORITHMS)
    models = asked(model, "Which networks? (or file.py:MyNet)", start.likely_model())
    what = start.experiment(file.stem, number, starter.several(algorithms), starter.several(models))
    starter.write(file, what)
    print(f"{source['name']}: {start.described()}")
    print(f"written: {file}; run it: perfed run {file}; what a key means: perfed explain KEY")
