"""``perfed reproduce`` and ``perfed tune``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

import perfed
from perfed.cli import completion
from perfed.cli.display import conducting
from perfed.cli.options import (
    CheckpointOption,
    DeviceOption,
    EngineOption,
    FileArgument,
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
    parse_algorithm,
    parse_numbers,
    parse_seeds,
    print_json,
    tell,
)
from perfed.config import load_yaml, overridden
from perfed.core import layout
from perfed.core.errors import ConfigError
from perfed.core.layout import Table
from perfed.engines import Execution
from perfed.paper import communication
from perfed.paper import tables as published_tables
from perfed.paper.published import GRID
from perfed.paper.reproduce import SINGLE, STUDIES
from perfed.paper.reproduce import write as write_files
from perfed.paper.tables import TableRun
from perfed.runs import tune as tuning
from perfed.runs.sampling import Range
from perfed.runs.study import Shard, Study
from perfed.runs.tune import SEED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = "all"


def reproduce(
    what: Annotated[
        str,
        typer.Argument(
            help="table1, table2, figure1, figure2, theorem1, theorem2, costs, or all",
            autocompletion=completion.results_of_the_paper,
        ),
    ],
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller version: minutes on a CPU, no download.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=named_path,
            metavar="PATH",
            help="The folder; default: runs/paper, or runs/paper-quick.",
        ),
    ] = None,
    as_json: JsonOption = False,
    settings: Annotated[str | None, typer.Option(help="Tables: paper or tuned settings.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Tables: rounds; default: 500.", min=1)] = None,
    selection: Annotated[
        str | None, typer.Option(help="Tables: uniform, or by-size as in Algorithm 1.")
    ] = None,
    fractions: Annotated[
        str | None,
        typer.Option(metavar="C,…", help="Tables: shares of clients per round; default: 0.1,0.15."),
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Tables: seeds; default: 0-2.")] = None,
    second_validation: Annotated[
        bool,
        typer.Option(
            "--second-validation",
            help="Tables: keep half of the validation samples from methods that use them, so that "
            "'chosen' is held-out evidence.",
        ),
    ] = False,
    without_repair: Annotated[
        bool,
        typer.Option(
            "--without-repair",
            help="Tables: leave out clients without enough samples, instead of giving them some "
            "of the largest clients'.",
        ),
    ] = False,
    methods: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Tables: run only these: local,perfed-ckt-3,…"),
    ] = None,
    shard: ShardOption = "1/1",
    seconds: SecondsOption = float("inf"),
    side_by_side: SideBySideOption = False,
    engine: EngineOption = "auto",
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    checkpoint_seconds: CheckpointOption = Execution.checkpoint_seconds,
) -> None:
    """Reproduce a result of the paper, and show it beside the paper's own numbers.

    A table takes many runs. The same command continues where it was stopped, and shows what there
    is so far. With --seconds 0 it only shows. Shards may run on several machines: copy their
    records/ into one folder.
    """
    known = [*SINGLE, *STUDIES]
    if what not in (*known, ALL):
        raise ConfigError(f"'{what}' is none of {', '.join(sorted(known))}, all", "reproduce")
    out = out or Path("runs", "paper-quick" if quick else "paper")

    wanted = known if what == ALL else [what]

    def chosen(what: str) -> TableRun:
        return published_tables.with_options(
            published_tables.table_run(STUDIES[what], quick),
            settings,
            rounds,
            selection,
            None if fractions is None else parse_numbers(fractions, "--fractions"),
            None if seeds is None else parse_seeds(seeds),
            second_validation,
            not without_repair,
        )

    few = methods.split(",") if methods else ()
    # All of them, before anything is run: a wrong option is told at once.
    studies = {each: chosen(each).study(out / each, few) for each in wanted if each in STUDIES}

    def table(what: str) -> Made:
        how = execution(engine, workers, device, precision, None, checkpoint_seconds)
        _run_study(studies[what], how, shard, seconds, side_by_side)
        run = chosen(what)
        result = run.study(out / what).records()
        if not result:
            raise ConfigError(f"{out / what} has no finished run yet", "reproduce")
        figure = published_tables.plot(run, result)
        figures = {run.title: figure} if figure else {}
        figures |= communication.figures(run, result)
        return Made(run.title, result, published_tables.tables(run, result), figures)

    results = {}
    for each in wanted:
        made = _single(each, quick) if each in SINGLE else table(each)
        results[each] = made.result
        if not as_json:
            _show(out, made)
    if as_json:
        print_json(results if what == ALL else results[what])


class Made(NamedTuple):
    """A result of the paper, made again."""

    name: str
    result: Any
    shown: Sequence[Table]
    figures: Mapping[str, Figure]
    """By the name of their files."""


def _single(what: str, quick: bool) -> Made:
    single = SINGLE[what]
    result = single.make(quick)
    return Made(what, result, single.tables(result), {what: single.plot(result)})


def _show(out: Path, made: Made) -> None:
    print(layout.text(made.shown))
    endings: dict[Path, list[str]] = {}
    for file in write_files(out, made.name, made.result, made.shown, made.figures):
        endings.setdefault(file.parent / file.stem, []).append(file.suffix[1:])
    names = [f"{file}.{{{','.join(found)}}}" for file, found in endings.items()]
    print(f"\nfiles: {' '.join(names)}")


def tune(
    file: FileArgument = None,
    algorithm: Annotated[
        list[str] | None,
        typer.Option(
            "--algorithm",
            "-a",
            metavar="NAME[,KEY=VALUE…]",
            help="The algorithm to tune.",
            autocompletion=completion.algorithms,
        ),
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="KEY=V,V,…",
            help="Values to try, such as algorithm.weight=0.5,2; once for each key. Or a range: "
            "0.5..2, or 0.1..10:log (needs optuna). Default: the paper's grid.",
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Try N settings of the grid, chosen at random; default: all. With a range: "
            "each chosen by those before it, and bad ones stopped early.",
            min=1,
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Seeds to tune with; not those you report results on.")
    ] = str(SEED),
    set_: SetOption = None,
    link: LinkOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=named_path,
            metavar="PATH",
            help="The folder; default: tune-<name>-<algorithm> in runs/.",
        ),
    ] = None,
    as_json: JsonOption = False,
    shard: ShardOption = "1/1",
    seconds: SecondsOption = float("inf"),
    side_by_side: SideBySideOption = False,
    engine: EngineOption = "auto",
    workers: WorkersOption = 0,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    checkpoint_seconds: CheckpointOption = Execution.checkpoint_seconds,
) -> None:
    """Search settings by validation accuracy.

    Every trial is kept. The same command continues a stopped search.
    """
    values = overridden(file, set_ or (), links=link or ())
    values.pop("seed", None)
    if algorithm:
        if len(algorithm) > 1:
            raise ConfigError("one algorithm is tuned at a time; give it once", "--algorithm")
        values.pop("algorithms", None)
        values["algorithm"] = parse_algorithm(algorithm[0])
    search = tuning.Search(
        values,
        _parse_grid(grid, values) if grid else _papers_grid(values),
        tuple(parse_seeds(seeds)),
        trials,
    )
    name = search.experiment(search.choices()[0], search.seeds[0]).algorithm.registered_name
    path = out or Path("runs", f"tune-{values.get('name', 'experiment')}-{name}")
    how = execution(engine, workers, device, precision, None, checkpoint_seconds)
    part = Shard.parse(shard)
    search.check_folder(path)
    search = search.run(path, how, (), part, seconds=0)  # what the records there lead to
    so_far, _ = _write_trials(search, path)  # says which search it is, also if this one is killed
    left = so_far["of"] - len(so_far["trials"])
    if left and not as_json:
        fewer = " (--trials: fewer, drawn at random)" if trials is None else ""
        tell(f"{left} of {so_far['of']} settings left to try{fewer}")
    with conducting(path) as display:
        search = search.run(path, how, [display], part, seconds, side_by_side)
    result, shown = _write_trials(search, path)
    if as_json:
        print_json(result)
        return
    print(layout.text(shown))
    chosen = tuning.best(result).items()
    best = " ".join(f"--set {key}={tuning.shown_value(value)}" for key, value in chosen)
    print(f"\nbest: {best}\nall trials: {path / tuning.FILE}")


def _write_trials(search: tuning.Search, folder: Path) -> tuple[dict[str, Any], list[Table]]:
    """The trials there are so far, to their folder."""
    result = search.result(search.study(folder).records())
    shown = tuning.tables(result)
    write_files(folder, tuning.NAME, result, shown)
    return result, shown


def _run_study(
    study: Study, how: Execution, shard: str, seconds: float, side_by_side: bool
) -> None:
    with conducting(study.folder) as display:
        study.run(how, [display], Shard.parse(shard), seconds, side_by_side)


def _parse_grid(
    texts: Sequence[str], values: Mapping[str, Any]
) -> dict[str, Sequence[Any] | Range]:
    """By key of an experiment. As in a study, ``weight`` is ``algorithm.weight``."""
    options = vars(perfed.algorithms.build(values.get("algorithm", "perfed-ckt")))
    grid: dict[str, Sequence[Any] | Range] = {}
    for text in texts:
        key, equals, choices = text.partition("=")
        if not equals or not choices:
            raise ConfigError(f"'{text}' is not of the form key=value,value", "--grid")
        key = f"algorithm.{key}" if key in options else key
        if key in grid:
            raise ConfigError("is there twice; give all its values at once", f"--grid {key}")
        where = f"--grid {key}"
        listed = [load_yaml(choice, where) for choice in choices.split(",")]
        grid[key] = Range.parse(choices, where) or listed
    return grid


def _papers_grid(values: Mapping[str, Any]) -> dict[str, Sequence[Any] | Range]:
    """The paper's, without what the algorithm has no use for."""
    algorithm = perfed.algorithms.build(values.get("algorithm", "perfed-ckt"))
    unused = set()
    if not algorithm.trains_on_public_set:
        unused.add("training.public_batch_size")
    if not hasattr(algorithm, "weight"):
        unused.add("algorithm.weight")
    return {key: choices for key, choices in GRID.items() if key not in unused}
