"""``perfed report`` and ``perfed export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli.options import named_path
from perfed.core.errors import ConfigError
from perfed.report import export as exporting
from perfed.report import page

RunsArgument = Annotated[
    list[Path], typer.Argument(metavar="RUN…", help="Run directories or comparisons.")
]


def report(
    runs: RunsArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=named_path,
            metavar="PATH",
            help="The page; default: RUN/report.html, for several runs ./report.html.",
        ),
    ] = None,
    figures: Annotated[
        list[str] | None,
        typer.Option(
            "--figures",
            metavar="png|pdf",
            help="Also write each chart as a file, beside the page. May be given twice.",
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Update the page while runs go on; it reloads by itself."),
    ] = False,
) -> None:
    """Write charts and tables of runs, finished or not, as one HTML file."""
    out = out or (runs[0] if len(runs) == 1 else Path()) / "report.html"
    for kind in figures or ():
        if kind not in page.FIGURES:
            raise ConfigError(f"'{kind}' is none of {', '.join(page.FIGURES)}", "--figures")
    if watch:
        print(f"report: {out}, made again until the runs are over (Ctrl-C ends)", flush=True)
        try:
            drawn = page.watch(runs, out)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    else:
        drawn = page.draw(runs)
        print(f"report: {drawn.write(out)}")
    for kind in figures or ():
        folder = out.with_name(f"{out.stem}-figures")
        print(f"{len(drawn.write_figures(folder, kind))} figures: {folder}/*.{kind}")


def export(
    runs: RunsArgument,
    format: Annotated[str, typer.Option("--format", help="csv or parquet")] = "csv",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=named_path,
            metavar="PATH",
            help="The folder; default: RUN/export, for several runs ./export.",
        ),
    ] = None,
) -> None:
    """Write the numbers of runs as tables for other programs.

    One file has a row for each round, the other a row for each client and round.
    """
    folder = out or (runs[0] if len(runs) == 1 else Path()) / "export"
    for file in exporting.export(runs, folder, format):
        print(file)
