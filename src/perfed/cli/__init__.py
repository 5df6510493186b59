"""The command line: parse, call, print."""

from __future__ import annotations

import atexit
import codecs
import inspect
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

import perfed
from perfed import bench as timing
from perfed.cli import (
    catalogue,
    configuration,
    data,
    doctor,
    federation,
    paper,
    report,
    runs,
    study,
    use,
)
from perfed.cli.options import DeviceOption, JsonOption, print_json
from perfed.core.errors import PerfedError

app = typer.Typer(
    help=(
        "Personalized federated learning for clients that differ in data and in model.\n\n"
        "Begin with 'perfed run': an example, a minute on a laptop, no download."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(command: Callable[..., None], name: str | None = None) -> None:
    """Its docstring is its help, each paragraph in one piece: Typer would keep the line breaks."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    app.command(name, help="\n\n".join(" ".join(text.split()) for text in paragraphs))(command)


_add(runs.run)
_add(runs.compare)
_add(study.study)
_add(report.report)
_add(report.export)
_add(use.predict)
_add(use.export_model, "export-model")
_add(use.serve)
_add(catalogue.list_, "list")
_add(configuration.init)
_add(configuration.explain)
_add(paper.reproduce)
_add(paper.tune)
_add(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(federation.federation, name="federation")
app.add_typer(federation.site, name="site")


@app.command()
def bench(device: DeviceOption = "auto", as_json: JsonOption = False) -> None:
    """Time the engines on this machine, on the same work: a minute or two."""
    result = timing.bench(device)
    if as_json:
        print_json(result, indent=1)
    else:
        print(timing.render(result))


def _version(wanted: bool) -> None:
    if wanted:
        print(f"perfed {perfed.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def main() -> None:
    _say_what_can_be_said()
    # An impatient third Ctrl-C while Python ends would show a traceback after the last word.
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    try:
        app()
    except PerfedError as error:
        print(f"perfed: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, a directory one may not write to
        print(f"perfed: {_said(error)}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
        hint = "fewer clients, smaller batches or networks, or --store-limit"
        print(f"perfed: not enough memory: {hint}", file=sys.stderr)
        sys.exit(2)


def _said(error: OSError) -> str:
    """The file that was meant, not the part that is written first, and no error number."""
    path = error.filename2 or error.filename
    if not path or not error.strerror:
        return str(error)
    path = Path(os.fsdecode(path))
    if path.name.startswith(".") and path.suffix == ".part":
        path = path.with_name(path.stem[1:])
    return f"{path}: {error.strerror}"


def _say_what_can_be_said() -> None:
    """A pipe on Windows may have no λ: a question mark stands there, and nothing is lost."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and codecs.lookup(stream.encoding).name != "utf-8":
            stream.reconfigure(errors="replace")


def _is_shortage(error: Exception) -> bool:
    """PyTorch has an error of its own for a GPU's memory, and none for the CPU's."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)
