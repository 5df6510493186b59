"""``perfed study``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perfed.cli import completion
from perfed.cli.display import conducting, print_tables
from perfed.cli.options import (
    CheckpointOption,
    DeviceOption,
    EngineOption,
    JsonOption,
    LinkOption,
    PrecisionOption,
    SecondsOption,
    SetOption,
    ShardOption,
    SideBySideOption,
    WorkersOption,
    execution,
    named_path,
    print_json,
)
from perfed.config import STUDIES, overridden
from perfed.core.errors import ConfigError
from perfed.engines import Execution
from perfed.report.page import FIGURES
from perfed.report.study import NAME, StudyPage
from perfed.runs import processes as several
from perfed.runs.design import Conduct, design
from perfed.runs.study import Shard
from perfed.runs.study_tables import Outcome


def study(
    file: Annotated[
        str,
        typer.Argument(
            help="A YAML file, or the name of a study of the package ('perfed list studies').",
            autocompletion=completion.studies,
        ),
    ],
    set_: SetOption = None,
    link: LinkOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", parser=named_path, metavar="PATH", help="The folder; default: runs/<name>."
        ),
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Run only these methods.")
    ] = None,
    settings: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Run only these settings.")
    ] = None,
    figures: Annotated[
        list[str] | None,
        typer.Option("--figures", metavar="png|pdf", help="Also write each figure as a file."),
    ] = None,
    as_json: JsonOption = False,
    shard: ShardOption = "1/1",
    seconds: SecondsOption = float("inf"),
    side_by_side: SideBySideOption = False,
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            metavar="N",
            min=0,
            help="Run N methods at once, each in its own process; 0: one per GPU, or per core.",
        ),
    ] = 1,
    engine: EngineOption = "auto",
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    checkpoint_seconds: CheckpointOption = Execution.checkpoint_seconds,
) -> None:
    """Compare methods in several settings: one page of tables and figures.

    Runs methods × settings × seeds. Differences come with intervals and tests.

    The same command continues a stopped study, and shows what there is so far. With --seconds 0 it
    only shows. Shards may run on several machines: copy their records/ into one folder.
    """
    values = overridden(file, set_ or (), STUDIES, link or ())
    planned = design(values)
    for kind in figures or ():
        if kind not in FIGURES:
            raise ConfigError(f"'{kind}' is none of {', '.join(FIGURES)}", "--figures")
    how = execution(engine, workers, device, precision, None, checkpoint_seconds)
    conduct = Conduct(planned, out or Path("runs", planned.name))
    few = [text.split(",") if text else [] for text in (methods, settings)]
    part = Shard.parse(shard)
    processes = processes or several.available()
    with conducting(conduct.folder, names=True) as display:
        if processes == 1 or not seconds:
            conduct.run(how, [display], part, seconds, side_by_side, *few)
        else:
            cells = conduct.unfinished(part, *few)
            display.begin(f"{len(cells)} of {len(planned.cells())} cells, {processes} at once")
            several.run(
                values, conduct.folder, cells, processes, how, seconds, side_by_side, display.tell
            )
    outcome = Outcome(planned, conduct.everything())
    chosen = conduct.write_choices(outcome.found)
    page = StudyPage(outcome)
    page.write(conduct.folder)
    for kind in figures or ():
        page.write_figures(conduct.folder / "figures", kind)
    if as_json:
        print_json(outcome.values())
        return
    print_tables(list(page.tables.values()))
    folder = conduct.folder
    print(f"page: {folder / NAME}.html\ntables: {folder / 'latex'}, {folder / 'csv'}")
    if figures:
        print(f"figures: {folder / 'figures'}")
    if planned.tuning:
        print(f"trials: {chosen}")
