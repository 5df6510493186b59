"""What several commands take, and how it is read."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from perfed.cli import completion
from perfed.config import MOST_SEEDS, load_yaml
from perfed.core.errors import ConfigError, cut
from perfed.core.schema import from_mapping
from perfed.engines import Execution
from perfed.runs.stopping import Stopped

ANSWER = "perfed.answer"  # where a command with --json keeps what was stdout

FileArgument = Annotated[
    str | None,
    typer.Argument(
        help="A YAML file, or the name of a preset ('perfed list presets').",
        autocompletion=completion.presets,
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as rounds=10."),
]
LinkOption = Annotated[
    list[str] | None,
    typer.Option(
        "--link",
        metavar="NAME",
        help="Send messages over this link, such as fewer bytes or noise ('perfed list links'). "
        "May be given several times.",
        autocompletion=completion.links,
    ),
]


def named_path(text: str) -> Path:
    """A path that somebody has written: '' is the working directory to Python, and to its user a
    variable that was not set."""
    if not text:
        raise ConfigError("'' is no path: name one, or write . for the working directory", "--out")
    return Path(text)


OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        parser=named_path,
        metavar="PATH",
        help="The run directory; default: runs/<name>-<time>.",
    ),
]


def _json_only(context: typer.Context, wanted: bool) -> bool:
    """What a user's own network or data prints must not get among the JSON: while the command
    goes on, what Python prints goes to stderr."""
    if wanted:
        context.meta[ANSWER] = sys.stdout
        context.with_resource(contextlib.redirect_stdout(sys.stderr))
    return wanted


def print_json(value: Any, indent: int | None = None) -> None:
    """The answer to --json, and all of it."""
    text = json.dumps(value, indent=indent, allow_nan=False)
    print(text, file=click.get_current_context().meta[ANSWER])


JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        callback=_json_only,
        is_eager=True,
        help="Print the result as JSON, and nothing else.",
    ),
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="sequential: one client after another; stacked: all clients at once; ray: like "
        "stacked, on several processes or machines",
        autocompletion=completion.engines,
    ),
]
WorkersOption = Annotated[
    int,
    typer.Option(
        "--workers", metavar="N", help="Ray workers; 0: one per GPU, or per core without a GPU."
    ),
]
DeviceOption = Annotated[
    str, typer.Option("--device", help="cpu, cuda, cuda:1, …; auto: a GPU if there is one")
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        "--precision",
        help="float32, tf32 or bf16; auto is float32",
        autocompletion=completion.precisions,
    ),
]
StoreOption = Annotated[
    float | None,
    typer.Option(
        "--store-limit",
        metavar="MIB",
        help="Keep at most this many MiB of client models in memory, the rest on disk.",
    ),
]
CheckpointOption = Annotated[
    float,
    typer.Option("--checkpoint-seconds", help="Write at most one checkpoint in this many seconds."),
]
TensorBoardOption = Annotated[
    bool,
    typer.Option("--tensorboard", help="Also write TensorBoard event files, in the run's folder."),
]
MlflowOption = Annotated[bool, typer.Option("--mlflow", help="Also log to MLflow.")]
WandbOption = Annotated[bool, typer.Option("--wandb", help="Also log to Weights & Biases.")]
ShardOption = Annotated[
    str, typer.Option("--shard", metavar="I/N", help="Run only part I of N, to divide the work.")
]
SideBySideOption = Annotated[
    bool, typer.Option("--side-by-side", help="Run all seeds of an algorithm at once.")
]
SecondsOption = Annotated[
    float, typer.Option("--seconds", help="Start no new run after this many seconds.", min=0)
]


def execution(
    engine: str,
    workers: int,
    device: str,
    precision: str,
    store_limit: float | None,
    checkpoint_seconds: float,
) -> Execution:
    values = {
        "engine": engine,
        "workers": workers,
        "device": device,
        "precision": precision,
        "store_limit": store_limit,
        "checkpoint_seconds": checkpoint_seconds,
    }
    try:
        return from_mapping(Execution, values)
    except ConfigError as error:
        raise ConfigError(error.message, "--" + error.where.replace("_", "-")) from None


def tell(line: str) -> None:
    """On stderr, where there still is one: a closed terminal is a reason to be here."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


def exit_code(stop: KeyboardInterrupt) -> int:
    """As shells have it: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    return 128 + (stop.number if isinstance(stop, Stopped) else signal.SIGINT)


def parse_algorithm(text: str) -> dict[str, Any]:
    """``perfed-ckt,clusters=3`` as a mapping."""
    name, *settings = text.split(",")
    values: dict[str, Any] = {"name": name}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"'{setting}' is not of the form key=value", "--algorithm")
        values[key] = load_yaml(value, f"--algorithm {key}")
    return values


def parse_seeds(text: str) -> list[int]:
    """``0,1,2`` or ``0-4``."""
    seeds: list[int] = []
    try:
        for piece in text.split(","):
            low, dash, high = piece.partition("-")
            first = int(low)
            last = int(high) if dash else first
            if last - first + len(seeds) >= MOST_SEEDS:
                raise ConfigError(f"'{cut(text)}' is more than {MOST_SEEDS:,} seeds", "--seeds")
            seeds += range(first, last + 1)
    except ValueError:
        raise ConfigError(
            f"'{cut(text)}' is not a list of whole numbers, as 0,1,2", "--seeds"
        ) from None
    if not seeds:
        raise ConfigError(f"there is no seed in {cut(text)}: the lower one comes first", "--seeds")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"a seed is there twice in {cut(text)}", "--seeds")
    return seeds


def parse_numbers(text: str, where: str) -> list[float]:
    try:
        numbers = [float(piece) for piece in text.split(",")]
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        raise ConfigError(f"'{text}' is not a list of numbers, as 0.1,0.15", where) from None
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"a number is there twice in {text}", where)
    return numbers
