"""Several algorithms and seeds, each a run directory of its own inside one folder."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from perfed.config import Comparison, Experiment, parse, read_mapping
from perfed.core.errors import ConfigError, Diverged, PerfedError, Pruned, RunError
from perfed.core.layout import Table, latex
from perfed.core.tensorfile import write_atomically
from perfed.core.threads import cpu_threads
from perfed.engines import Call, Engine, Execution
from perfed.engines.execution import fitting_threads
from perfed.runs.coordinator import Callback, Steps
from perfed.runs.directory import LOCK, RunDirectory, claimed_path, make_directory
from perfed.runs.drawing import drawing
from perfed.runs.result import Result, hostile_words_of
from perfed.runs.settings import changes, text_of
from perfed.runs.simulation import (
    AUTOMATIC,
    Simulation,
    as_recorded,
    checked,
    resume_run,
)
from perfed.runs.stopping import Stop, Stopped

FILE = "comparison.yaml"


class ComparisonResult:
    """The runs of a comparison, those there are so far, and which of them failed."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self.comparison = read_comparison(self.path)
        self.results = [
            _result(folder, experiment)
            for experiment in self.comparison.experiments()
            if ((folder := self.path / run_name(experiment)) / "summary.json").is_file()
        ]
        self.failures = [
            f"{experiment.algorithm.label()}, seed {experiment.seed}, has no result: {failure}"
            for experiment in self.comparison.experiments()
            if (failure := RunDirectory(self.path / run_name(experiment)).failure)
        ]

    def table(self) -> str:
        """Mean ± standard deviation over seeds, a row per algorithm and model; and each against
        local training, where that is among them."""
        return "\n".join(["\n\n".join(table.text() for table in self.tables()), *self.failures])

    def tables(self) -> list[Table]:
        from perfed.runs.tables import against_local, standing, summary

        gains = against_local(self.results)
        first = summary([r.summary for r in self.results], standing(self.results))
        if hostile := hostile_words_of(self.results):
            first = replace(first, note=f"{first.note}\n{hostile}")
        return [first, *([gains] if gains else [])]

    def record(self) -> dict[str, Any]:
        """All one needs to quote the comparison: its numbers, configuration and machine."""
        from perfed.runs.tables import against_local_record

        machines = [result.record()["environment"] for result in self.results]
        return {
            "runs": [result.summary for result in self.results],
            "against_local": against_local_record(self.results),
            "failures": self.failures,
            "config": self.comparison.to_mapping(),
            "environment": machines[0] if machines else {},
            "directory": str(self.path),
        }

    def latex(self, path: str | Path | None = None) -> Path:
        """The tables for a paper, as a file with ``tabular`` environments."""
        file = Path(path or self.path / "comparison.tex")
        tables = [replace(table, title=table.title or self._title()) for table in self.tables()]
        write_atomically(file, f"{latex(tables)}\n".encode())
        return file

    def _title(self) -> str:
        seeds = len(self.comparison.seeds)
        return f"{self.comparison.experiment.name}: {f'{seeds} seeds' if seeds > 1 else 'one seed'}"

    def plot(self, path: str | Path | None = None) -> Path:
        """Accuracy by round and by communication, as a PNG or PDF file."""
        return drawing().plot(self.results, Path(path or self.path / "comparison.png"))

    def report(self, path: str | Path | None = None) -> Path:
        """All there is to see of it, as one HTML file."""
        return drawing().page([self.path], Path(path or self.path / "report.html"))


def _result(folder: Path, experiment: Experiment) -> Result:
    """Of a run that is still the one that the comparison lists."""
    result = Result(folder)
    if changed := changes(result.experiment, experiment):
        raise RunError(f"{folder.parent / FILE} is not what {folder.name} ran: {text_of(changed)}")
    return result


def read_comparison(path: Path) -> Comparison:
    if not (path / FILE).is_file():
        raise RunError(f"{path} is not a comparison: it has no {FILE}")
    comparison = parse(read_mapping(path / FILE))
    if not isinstance(comparison, Comparison):
        raise RunError(f"{path / FILE} lists no algorithms or seeds")
    return comparison


def run_name(experiment: Experiment) -> str:
    """A folder name: the algorithm with its options, and the seed."""
    kept = (c if c.isalnum() or c in "-=.+" else " " for c in experiment.algorithm.label())
    return f"{'-'.join(''.join(kept).split())}-seed{experiment.seed}"


def _check_names(comparison: Comparison) -> None:
    """No two runs may have one folder: the second would be taken for done."""
    labels: dict[str, str] = {}
    for experiment in comparison.experiments():
        label = experiment.algorithm.label()
        other = labels.setdefault(run_name(experiment), label)
        if other != label:
            raise ConfigError(
                f"'{other}' and '{label}' would have one folder, '{run_name(experiment)}': "
                "compare them in two runs",
                "algorithms",
            )


def compare(
    comparison: Comparison,
    directory: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    how: Execution = AUTOMATIC,
    side_by_side: bool = False,
) -> ComparisonResult:
    """Run every algorithm with every seed, in a new directory.

    ``side_by_side`` runs all seeds of an algorithm at once, in one stack.
    """
    comparison = checked(comparison, Comparison, "perfed.compare")
    _check_names(comparison)
    first = comparison.experiments()[0]
    for experiment in comparison.experiments():  # what cannot run must not start
        if experiment.algorithm == first.algorithm or experiment.seed == first.seed:
            Simulation(experiment, how=how)
    path = Path(directory) if directory else claimed_path(comparison.experiment.name)
    make_directory(path)
    RunDirectory(path).write_yaml(FILE, comparison.to_mapping())
    return resume_comparison(path, callbacks=callbacks, how=how, side_by_side=side_by_side)


def resume_comparison(
    directory: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    how: Execution = AUTOMATIC,
    side_by_side: bool = False,
) -> ComparisonResult:
    """Run what is not finished. A method that diverges is recorded, and the others go on."""
    path = Path(directory)
    comparison = ComparisonResult(path).comparison  # what is finished is as it was
    for experiment in comparison.experiments():  # what was begun goes on in one precision
        how = as_recorded(RunDirectory(path / run_name(experiment)), how)
    at_once = len(comparison.seeds) if side_by_side else 1
    experiments = comparison.experiments()
    with how.several_runs():
        for start in range(0, len(experiments), at_once):
            open_runs = {
                path / run_name(experiment): experiment
                for experiment in experiments[start : start + at_once]
                if not _is_closed(path / run_name(experiment))
            }
            run_together(open_runs, callbacks, how)
    return ComparisonResult(path)


def resume(
    directory: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    how: Execution = AUTOMATIC,
    accept_changes: bool = False,
) -> Result | ComparisonResult:
    """Continue a run from its newest checkpoint, or of a comparison what is not finished; what is
    finished is returned as it is. A :class:`ComparisonResult` of a comparison, else a
    :class:`Result`.

    A run whose config.yaml was changed is refused. ``accept_changes`` takes the change over, where
    the run can go on with it: more rounds, say, or another learning rate.
    """
    if not (Path(directory) / FILE).is_file():
        common: dict[str, Any] = {"callbacks": callbacks, "how": how}
        return resume_run(directory, **common, accept_changes=accept_changes)
    if accept_changes:
        raise ConfigError("takes a run: those of a comparison differ in nothing", "accept_changes")
    return resume_comparison(directory, callbacks=callbacks, how=how)


def _is_closed(folder: Path) -> bool:
    directory = RunDirectory(folder)
    return directory.finished or bool(directory.failure)


def run_together(
    experiments: Mapping[Path, Experiment], callbacks: Sequence[Callback], how: Execution
) -> None:
    """Start or continue each experiment in its directory, all on one engine, until each has ended,
    diverged or was pruned. Ctrl-C and the like stop each after its round."""
    engine: Engine | None = None
    runs: dict[Path, Steps[Result]] = {}
    stop = Stop()
    with ExitStack() as locks:
        for folder, experiment in experiments.items():
            opened = RunDirectory(folder)
            folder.mkdir(exist_ok=True)
            locks.enter_context(opened.locked())
            locks.callback(opened.remove_leftovers)
            if not (folder / "config.yaml").is_file():
                _remove_unstarted(folder)
            simulation = Simulation(experiment, callbacks, how, engine)
            if engine is None:
                engine = simulation.engine
                locks.callback(engine.close)
            runs[folder] = simulation.steps(opened, stop)
            locks.enter_context(cpu_threads(fitting_threads(simulation.population)))
        locks.enter_context(stop.listening())
        waiting: dict[Path, list[Call]] = {}
        results: dict[Path, list[Any] | None] = dict.fromkeys(runs)
        while runs:
            for folder, steps in list(runs.items()):
                try:
                    waiting[folder] = steps.send(results[folder])  # type: ignore[arg-type]
                except (StopIteration, Diverged, Pruned, Stopped):
                    del runs[folder]
            if engine is not None:
                try:
                    results = dict(_perform_all(engine, {f: waiting[f] for f in runs}))
                except ConfigError as error:  # each keeps what it has done
                    _throw_into(runs.values(), error)
    engine = None
    gc.collect()  # an engine and its clients know each other: their models would stay for a while
    if stop.asked:  # also where it was the last round: nothing further is begun
        raise Stopped(stop.number)


def _throw_into(runs: Iterable[Steps[Result]], error: ConfigError) -> NoReturn:
    ends: list[PerfedError] = []
    for steps in runs:
        try:
            steps.throw(error)
        except PerfedError as end:
            ends.append(end)
    raise ends[0] if ends else error


def _perform_all(
    engine: Engine, waiting: Mapping[Path, list[Call]]
) -> Iterator[tuple[Path, list[Any]]]:
    """The calls of all runs as one, and each run's share of what they gave."""
    given = iter(engine.perform([call for calls in waiting.values() for call in calls]))
    for folder, calls in waiting.items():
        yield folder, [next(given) for _ in calls]


def _remove_unstarted(folder: Path) -> None:
    """A run killed before it wrote its configuration has nothing in it worth keeping."""
    for file in folder.iterdir():
        if file.name != LOCK:
            file.unlink()
