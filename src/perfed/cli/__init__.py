"""The command line: parse, call, print."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

import perfed
from perfed import bench as timing
from perfed.cli import catalogue, data, doctor, federation, own, paper, report, runs
from perfed.cli.options import DeviceOption, JsonOption
from perfed.core.errors import PerfedError

app = typer.Typer(
    help="Personalized federated learning for clients that differ in data and in model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(runs.run)
app.command()(runs.compare)
app.command()(report.report)
app.command()(report.export)
app.command("list")(catalogue.list_)
app.command()(own.init)
app.command()(own.explain)
app.command()(paper.reproduce)
app.command()(paper.tune)
app.command()(doctor.doctor)
app.add_typer(data.app, name="data")
app.add_typer(federation.federation, name="federation")
app.add_typer(federation.site, name="site")


@app.command()
def bench(device: DeviceOption = "auto", as_json: JsonOption = False) -> None:
    """Time the engines on the same work: a minute or two."""
    result = timing.bench(device)
    print(json.dumps(result, indent=1) if as_json else timing.render(result))


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
    try:
        app()
    except PerfedError as error:
        print(f"perfed: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, a directory one may not write to
        print(f"perfed: {error}", file=sys.stderr)
        sys.exit(2)
