"""The command line: parse, call, print."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import perfed
from perfed import bench as timing
from perfed import cli_data, cli_federation
from perfed.config import (
    Comparison,
    Experiment,
    load_yaml,
    overridden,
    parse,
    preset_names,
    read_mapping,
)
from perfed.core.errors import ConfigError, Diverged, PerfedError
from perfed.core.registry import Registry
from perfed.core.schema import from_mapping
from perfed.engines import Execution
from perfed.paper import tables as published_tables
from perfed.paper.published import GRID
from perfed.paper.reproduce import SINGLE, STUDIES
from perfed.paper.reproduce import write as write_files
from perfed.report import layout
from perfed.report.tables import FOOTNOTE, HEADER, cells, quantity, rows, summary_table
from perfed.runs import Callback, ComparisonResult, Result, RoundReport
from perfed.runs import tune as tuning
from perfed.runs.comparison import FILE as COMPARISON_FILE
from perfed.runs.comparison import resume_comparison
from perfed.runs.directory import default_path
from perfed.runs.study import Shard, Study
from perfed.runs.tune import SEED

app = typer.Typer(
    help="Personalized federated learning for clients that differ in data and in model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(cli_data.app, name="data")
app.add_typer(cli_federation.federation, name="federation")
app.add_typer(cli_federation.site, name="site")

FileArgument = Annotated[
    str | None,
    typer.Argument(help="A YAML file, or the name of a preset ('perfed list presets')."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one key, such as rounds=10."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Where the run goes; runs/<name>-<time> unless told otherwise."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the final summary as JSON only.")]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine",
        help="sequential (one client after another), stacked (all as one), ray (so, on workers)",
    ),
]
WorkersOption = Annotated[
    int,
    typer.Option(
        "--workers", metavar="N", help="With --engine ray; 0: one for each GPU, or else core."
    ),
]
DeviceOption = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1, …")]
PrecisionOption = Annotated[
    str, typer.Option("--precision", help="float32, tf32 or bf16; auto is float32")
]
StoreOption = Annotated[
    float | None,
    typer.Option("--store-limit", metavar="MIB", help="Client models in memory; the rest on disk."),
]
CheckpointOption = Annotated[
    float, typer.Option("--checkpoint-seconds", help="A checkpoint at most every so many seconds.")
]
ShardOption = Annotated[
    str, typer.Option("--shard", metavar="I/N", help="Only every N-th piece, from the I-th.")
]
SideBySideOption = Annotated[
    bool, typer.Option("--side-by-side", help="All seeds of an algorithm at once, as one stack.")
]
SecondsOption = Annotated[
    float, typer.Option("--seconds", help="Begin no further run after so many seconds.", min=0)
]


@app.command()
def run(
    file: FileArgument = None,
    set_: SetOption = None,
    out: OutOption = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="Continue this run or comparison.")
    ] = None,
    as_json: JsonOption = False,
    engine: EngineOption = "auto",
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    store_limit: StoreOption = None,
    checkpoint_seconds: CheckpointOption = 10.0,
) -> None:
    """Run an experiment; without a FILE, the embedded example (a minute on a laptop)."""
    how = _execution(engine, workers, device, precision, store_limit, checkpoint_seconds)
    if resume is not None:
        if file or set_ or out:
            raise ConfigError("takes no FILE, --set or --out: the run has its own", "--resume")
        _execute(None, resume, as_json, how)
    else:
        what = perfed.load(file, set_ or ())
        _execute(what, _target(what, out), as_json, how)


@app.command()
def compare(
    file: FileArgument = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm", "-a", metavar="NAME[,KEY=VALUE…]", help="perfed-ckt,clusters=3,weight=2"
        ),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="0,1,2 or 0-4")] = None,
    set_: SetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    side_by_side: SideBySideOption = False,
    engine: EngineOption = "auto",
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    store_limit: StoreOption = None,
    checkpoint_seconds: CheckpointOption = 10.0,
) -> None:
    """Run several algorithms with several seeds: one table, mean ± standard deviation."""
    values = overridden(file, set_ or ())
    if algorithm:
        values.pop("algorithm", None)
        values["algorithms"] = [_parse_algorithm(text) for text in algorithm]
    elif "algorithm" in values:
        values["algorithms"] = [values.pop("algorithm")]
    if seeds is not None:
        values.pop("seed", None)
        values["seeds"] = _parse_seeds(seeds)
    values.setdefault("algorithms", ["perfed-ckt"])
    what = parse(values)
    how = _execution(engine, workers, device, precision, store_limit, checkpoint_seconds)
    _execute(what, _target(what, out), as_json, how, side_by_side)


@app.command("list")
def list_(
    kind: Annotated[
        str | None, typer.Argument(help="algorithms, models, datasets, partitions or presets")
    ] = None,
) -> None:
    """What there is to choose from, with every option and its default."""
    registries: dict[str, Registry[Any]] = {
        "algorithms": perfed.algorithms,
        "models": perfed.architectures,
        "datasets": perfed.datasets,
        "partitions": perfed.partitions,
    }
    known = [*registries, "presets"]
    if kind is not None and kind not in known:
        raise ConfigError(f"'{kind}' is none of {', '.join(known)}", "list")
    console = Console()
    for title in [kind] if kind else known:
        if title == "presets":
            _print_presets(console)
        else:
            _print_registry(console, title, registries[title])


@app.command()
def bench(device: DeviceOption = "auto", as_json: JsonOption = False) -> None:
    """Time the engines on the same work: a minute or two."""
    result = timing.bench(device)
    print(json.dumps(result, indent=1) if as_json else timing.render(result))


@app.command()
def reproduce(
    what: Annotated[
        str,
        typer.Argument(help="table1, table2, figure1, figure2, theorem1, theorem2 or costs"),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller, in minutes on a CPU, without a download.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where files go: runs/paper or runs/paper-quick without it."),
    ] = None,
    as_json: JsonOption = False,
    settings: Annotated[str | None, typer.Option(help="Tables: paper or tuned settings.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Tables: instead of 500.", min=1)] = None,
    selection: Annotated[
        str | None, typer.Option(help="Tables: uniform, or by-size as in Algorithm 1.")
    ] = None,
    fractions: Annotated[
        str | None, typer.Option(metavar="C,…", help="Tables: instead of 0.1,0.15.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Tables: instead of 0-2.")] = None,
    shard: ShardOption = "1/1",
    seconds: SecondsOption = float("inf"),
    side_by_side: SideBySideOption = False,
    engine: EngineOption = "auto",
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    checkpoint_seconds: CheckpointOption = 10.0,
) -> None:
    """Make a result of the paper again, beside the paper's own numbers.

    The tables are many runs. The same command goes on where it was stopped, and shows what there
    is so far; --seconds 0 only shows it. Shards may run on several machines: copy their records/
    into one folder.
    """
    known = [*SINGLE, *STUDIES]
    if what not in known:
        raise ConfigError(f"'{what}' is none of {', '.join(sorted(known))}", "reproduce")
    out = out or Path("runs", "paper-quick" if quick else "paper")
    if what in SINGLE:
        made = SINGLE[what]
        result = made.make(quick)
        shown, figure = made.tables(result), made.plot(result)
    else:
        plan = published_tables.with_options(
            published_tables.plan(STUDIES[what], quick),
            settings,
            rounds,
            selection,
            None if fractions is None else _parse_numbers(fractions, "--fractions"),
            None if seeds is None else _parse_seeds(seeds),
        )
        study = plan.study(out / what)
        how = _execution(engine, workers, device, precision, None, checkpoint_seconds)
        _run_study(study, how, shard, seconds, side_by_side)
        result = study.records()
        if not result:
            raise ConfigError(f"{study.folder} has no finished run yet", "reproduce")
        shown, figure = published_tables.tables(plan, result), published_tables.plot(plan, result)
    if as_json:
        print(json.dumps(result))
        return
    print(layout.text(shown))
    files = write_files(out, what, result, shown, figure)
    print(f"\nfiles: {files[0].with_suffix('')}.{{{','.join(f.suffix[1:] for f in files)}}}")


@app.command()
def tune(
    file: FileArgument = None,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", "-a", metavar="NAME[,KEY=VALUE…]", help="What is tuned."),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=V,V,…",
            help="Values to try, such as training.learning_rate=0.1,0.01; the paper's without it.",
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="So many of the grid, at random; all without it.", min=1)
    ] = None,
    seeds: Annotated[str, typer.Option(help="Not those you will report on.")] = str(SEED),
    set_: SetOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    shard: ShardOption = "1/1",
    seconds: SecondsOption = float("inf"),
    side_by_side: SideBySideOption = False,
    engine: EngineOption = "auto",
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    checkpoint_seconds: CheckpointOption = 10.0,
) -> None:
    """Search settings by validation accuracy and keep every trial; resumes where it stopped."""
    values = overridden(file, set_ or ())
    values.pop("seed", None)
    if algorithm is not None:
        values.pop("algorithms", None)
        values["algorithm"] = _parse_algorithm(algorithm)
    search = tuning.Search(
        values,
        _parse_grid(grid) if grid else _papers_grid(values),
        tuple(_parse_seeds(seeds)),
        trials,
    )
    path = out or Path("runs", f"tune-{values.get('name', 'experiment')}")
    study = search.study(path)
    how = _execution(engine, workers, device, precision, None, checkpoint_seconds)
    _run_study(study, how, shard, seconds, side_by_side)
    result = search.result(study.records())
    shown = tuning.tables(result)
    write_files(path, "tune", result, shown)
    if as_json:
        print(json.dumps(result))
        return
    print(layout.text(shown))
    best = " ".join(f"--set {key}={value:g}" for key, value in tuning.best(result).items())
    print(f"\nbest: {best}\nall trials: {path / 'tune.json'}")


def _run_study(
    study: Study, how: Execution, shard: str, seconds: float, side_by_side: bool
) -> None:
    with Display(Console(stderr=True)) as display:
        try:
            study.run(how, [display], Shard.parse(shard), seconds, side_by_side)
        except KeyboardInterrupt:
            print("\ninterrupted; the same command goes on", file=sys.stderr)
            raise typer.Exit(130) from None


def _parse_grid(texts: Sequence[str]) -> dict[str, list[Any]]:
    grid = {}
    for text in texts:
        key, equals, choices = text.partition("=")
        if not equals or not choices:
            raise ConfigError(f"'{text}' is not of the form key=value,value", "--grid")
        grid[key] = [load_yaml(choice, f"--grid {key}") for choice in choices.split(",")]
    return grid


def _papers_grid(values: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """The paper's, without what the algorithm has no use for."""
    algorithm = perfed.algorithms.build(values.get("algorithm", "perfed-ckt"))
    unused = set()
    if not algorithm.trains_on_public_set:
        unused.add("training.public_batch_size")
    if not hasattr(algorithm, "weight"):
        unused.add("algorithm.weight")
    return {key: choices for key, choices in GRID.items() if key not in unused}


def _parse_numbers(text: str, where: str) -> list[float]:
    try:
        return [float(piece) for piece in text.split(",")]
    except ValueError:
        raise ConfigError(f"'{text}' is not a list of numbers, as 0.1,0.15", where) from None


def _print_registry(console: Console, title: str, registry: Registry[Any]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("name", "option", "default", "meaning"):
        table.add_column(column, style="bold" if column == "name" else None)
    for name in sorted(registry):
        cls = registry[name]
        about = " ".join((cls.__doc__ or "").split("\n\n")[0].replace("``", "'").split())
        if about.startswith(f"{cls.__name__}("):  # what dataclasses write by themselves
            about = sys.modules[cls.__module__].__doc__ or ""
            about = about.splitlines()[0]
        table.add_row(name, "", "", about)
        for field in dataclasses.fields(cls):
            default = ", ".join(map(str, d)) if isinstance(d := field.default, tuple) else str(d)
            symbol = field.metadata.get("symbol", "")
            meaning = f"{symbol}: {field.metadata['help']}" if symbol else field.metadata["help"]
            table.add_row("", field.name, default, meaning)
    console.print(table)
    console.print()


def _print_presets(console: Console) -> None:
    table = Table(
        title="presets", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("name", style="bold")
    table.add_column("what it is")
    for name in preset_names():
        table.add_row(name, str(read_mapping(name).get("about", "")))
    console.print(table)


def _target(what: Experiment | Comparison, out: Path | None) -> Path:
    name = what.experiment.name if isinstance(what, Comparison) else what.name
    return out or default_path(name)


def _execution(
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
        "store_limit": float("inf") if store_limit is None else store_limit,
        "checkpoint_seconds": checkpoint_seconds,
    }
    try:
        return from_mapping(Execution, values)
    except ConfigError as error:
        raise ConfigError(error.message, "--" + error.where.replace("_", "-")) from None


def _execute(
    what: Experiment | Comparison | None,
    path: Path,
    as_json: bool,
    how: Execution,
    side_by_side: bool = False,
) -> None:
    """Start ``what`` in ``path``, or continue what is there, and print how it ended."""
    console = Console(stderr=as_json)
    result: Result | ComparisonResult
    try:
        with Display(console) as display:
            common: dict[str, Any] = {"callbacks": [display], "how": how}
            if isinstance(what, Comparison):
                result = perfed.compare(what, path, **common, side_by_side=side_by_side)
            elif what is not None:
                result = perfed.run(what, path, **common)
            elif (path / COMPARISON_FILE).is_file():
                result = resume_comparison(path, **common)
            else:
                result = perfed.resume(path, **common)
    except KeyboardInterrupt:
        if (path / "config.yaml").is_file() or (path / COMPARISON_FILE).is_file():
            print(f"\ninterrupted; continue with: perfed run --resume {path}", file=sys.stderr)
        raise typer.Exit(130) from None
    _print_end(console, result, as_json)


def _print_end(console: Console, result: Result | ComparisonResult, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.record(), indent=1, allow_nan=False))
    if not result.results:
        raise Diverged("; ".join(result.failures))
    if as_json:
        return
    print_table(console, [one.summary for one in result.results])
    for failure in result.failures:
        console.print(failure, soft_wrap=True, highlight=False)
    console.print(f"figure: {result.plot()}", soft_wrap=True, highlight=False)
    console.print(f"run directory: {result.path}", soft_wrap=True, highlight=False)


def print_table(console: Console, summaries: Sequence[dict[str, Any]]) -> None:
    if not console.is_terminal:  # as wide as it needs to be, for a file or a pipe
        print(f"\n{summary_table(summaries)}\n", flush=True)
        return
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for number, title in enumerate(HEADER):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=number != 0)
    for row in rows(summaries):
        table.add_row(*cells(row))
    console.print()
    console.print(table)
    console.print(f"[dim]{FOOTNOTE}[/dim]", highlight=False)
    console.print()


def _parse_algorithm(text: str) -> dict[str, Any]:
    """``perfed-ckt,clusters=3`` as a mapping."""
    name, *settings = text.split(",")
    values: dict[str, Any] = {"name": name}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"'{setting}' is not of the form key=value", "--algorithm")
        values[key] = load_yaml(value, f"--algorithm {key}")
    return values


def _parse_seeds(text: str) -> list[int]:
    """``0,1,2`` or ``0-4``."""
    seeds: list[int] = []
    try:
        for piece in text.split(","):
            low, dash, high = piece.partition("-")
            seeds += range(int(low), int(high) + 1) if dash else [int(low)]
    except ValueError:
        raise ConfigError(f"'{text}' is not a list of whole numbers, as 0,1,2", "--seeds") from None
    return seeds


class Display(Callback):
    """A live bar per run in a terminal; elsewhere a plain line for every tenth of the rounds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("round {task.completed}/{task.total}"),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=console,
            )
        self._began: dict[str, tuple[float, int]] = {}
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def on_start(self, experiment: Experiment, directory: Path, first_round: int) -> None:
        name = _run_title(experiment)
        self._began[name] = (time.monotonic(), first_round)
        if self._bars:
            self._tasks[name] = self._bars.add_task(
                name, total=experiment.rounds, completed=first_round, facts=""
            )

    def on_round(self, report: RoundReport) -> None:
        name = _run_title(report.experiment)
        done, total = report.round + 1, report.experiment.rounds
        accuracy = "" if report.accuracy is None else f"accuracy {100 * report.accuracy:.1f} %  "
        facts = accuracy + quantity(report.traffic.bytes, "B").rjust(7)
        if self._bars:
            self._bars.update(self._tasks[name], completed=done, facts=facts)
        elif done == total or done % max(1, total // 10) == 0:
            began, first = self._began[name]
            pace = (time.monotonic() - began) / (done - first)
            left = f"{pace * (total - done):.0f} s left" if done < total else "done"
            self._console.print(
                f"{name}: round {done}/{total}  {facts}  {left}", soft_wrap=True, highlight=False
            )


def _run_title(experiment: Experiment) -> str:
    return f"{experiment.algorithm.label()}, seed {experiment.seed}"


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
