"""``perfed run`` and ``perfed compare``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import perfed
from perfed.cli import completion
from perfed.cli.display import Display, print_tables
from perfed.cli.options import (
    CheckpointOption,
    DeviceOption,
    EngineOption,
    FileArgument,
    JsonOption,
    LinkOption,
    MlflowOption,
    OutOption,
    PrecisionOption,
    SetOption,
    SideBySideOption,
    StoreOption,
    TensorBoardOption,
    WandbOption,
    WorkersOption,
    execution,
    exit_code,
    parse_algorithm,
    parse_seeds,
    print_json,
    tell,
)
from perfed.config import Comparison, Experiment, overridden, parse
from perfed.core.errors import ConfigError, Diverged, RunError, shown
from perfed.engines import Execution
from perfed.report.trackers import trackers
from perfed.runs import Callback, ComparisonResult, Result
from perfed.runs.comparison import FILE as COMPARISON_FILE

BEGUN = ("config.yaml", COMPARISON_FILE)  # one of them is in a folder that can be resumed


def run(
    file: FileArgument = None,
    set_: SetOption = None,
    link: LinkOption = None,
    out: OutOption = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue this run or comparison.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="With --resume: accept what you changed in the run's config.yaml.",
        ),
    ] = False,
    as_json: JsonOption = False,
    engine: EngineOption = "auto",
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    store_limit: StoreOption = None,
    checkpoint_seconds: CheckpointOption = Execution.checkpoint_seconds,
    tensorboard: TensorBoardOption = False,
    mlflow: MlflowOption = False,
    wandb: WandbOption = False,
) -> None:
    """Run an experiment. Without a FILE, run the example (a minute on a laptop).

    Write a FILE to start from with 'perfed init'. 'perfed explain KEY' says what a key means.
    """
    how = execution(engine, workers, device, precision, store_limit, checkpoint_seconds)
    tracking = trackers(tensorboard=tensorboard, mlflow=mlflow, wandb=wandb)
    if resume is not None:
        if file or set_ or link or out:
            raise ConfigError(
                "takes no FILE, --set, --link or --out: the run has its own", "--resume"
            )
        _execute(None, resume, as_json, how, tracking, accept_changes=accept_changes)
    elif accept_changes:
        raise ConfigError("needs --resume: a new run has no settings yet", "--accept-changes")
    else:
        what = perfed.load(file, set_ or (), link or ())
        _execute(what, out, as_json, how, tracking)


def compare(
    file: FileArgument = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm",
            "-a",
            metavar="NAME[,KEY=VALUE…]",
            help="An algorithm, with options that are not the defaults, such as "
            "perfed-ckt,clusters=3. Once for each algorithm.",
            autocompletion=completion.algorithms,
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Run each algorithm with these seeds: 0,1,2 or 0-4.")
    ] = None,
    set_: SetOption = None,
    link: LinkOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    side_by_side: SideBySideOption = False,
    engine: EngineOption = "auto",
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    store_limit: StoreOption = None,
    checkpoint_seconds: CheckpointOption = Execution.checkpoint_seconds,
    tensorboard: TensorBoardOption = False,
    mlflow: MlflowOption = False,
    wandb: WandbOption = False,
) -> None:
    """Compare several algorithms over several seeds, in one table.

    The table has mean ± standard deviation. If local training is one of the algorithms, a second
    table says who gains and who loses against it.
    """
    values = overridden(file, set_ or (), links=link or ())
    if algorithm:
        values.pop("algorithm", None)
        values["algorithms"] = [parse_algorithm(text) for text in algorithm]
    elif "algorithm" in values:
        values["algorithms"] = [values.pop("algorithm")]
    if seeds is not None:
        values.pop("seed", None)
        values["seeds"] = parse_seeds(seeds)
    values.setdefault("algorithms", ["perfed-ckt"])
    what = parse(values)
    how = execution(engine, workers, device, precision, store_limit, checkpoint_seconds)
    tracking = trackers(tensorboard=tensorboard, mlflow=mlflow, wandb=wandb)
    _execute(what, out, as_json, how, tracking, side_by_side)


def _execute(
    what: Experiment | Comparison | None,
    path: Path | None,
    as_json: bool,
    how: Execution,
    tracking: Sequence[Callback],
    side_by_side: bool = False,
    accept_changes: bool = False,
) -> None:
    """Start ``what`` in ``path`` (or in a new folder), or continue what is there, and print how it
    ended."""
    result: Result | ComparisonResult
    display = Display(path, resuming=what is None)
    common: dict[str, Any] = {"callbacks": [display, *tracking], "how": how}
    try:
        with display:
            if isinstance(what, Comparison):
                result = perfed.compare(what, path, **common, side_by_side=side_by_side)
            elif what is not None:
                result = perfed.run(what, path, **common)
            else:
                assert path is not None
                result = perfed.resume(path, **common, accept_changes=accept_changes)
    except SystemExit as error:  # it would look like a run that has ended well
        raise RunError(f"code of your own ended Python (sys.exit({shown(error.code)}))") from None
    except KeyboardInterrupt as stop:
        if display.folder and any((display.folder / name).is_file() for name in BEGUN):
            where = display.folder
            tell(f"\ninterrupted; continue with: perfed run --resume {where}")
        raise typer.Exit(exit_code(stop)) from None
    _print_end(result, as_json)


def _print_end(result: Result | ComparisonResult, as_json: bool) -> None:
    if as_json:
        print_json(result.record(), indent=1)
    if not result.results:
        raise Diverged("; ".join(result.failures))
    if as_json:
        return
    figure, report = result.plot(), result.report()  # also where nobody reads to the end
    latex = f"LaTeX: {result.latex()}\n" if isinstance(result, ComparisonResult) else ""
    print_tables(result.tables())
    for line in result.failures:
        print(line)
    print(f"figure: {figure}\n{latex}report: {report}\nrun directory: {result.path}")
