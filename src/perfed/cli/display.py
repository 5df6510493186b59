"""What is shown while runs go on, and of their end."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import rich.table
import typer
from rich.console import Console, JustifyMethod
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from perfed.cli.options import exit_code, tell
from perfed.config import Experiment
from perfed.core.errors import RunError, shown
from perfed.core.layout import Table
from perfed.runs import Callback, RoundReport
from perfed.runs.comparison import FILE as COMPARISON_FILE
from perfed.runs.directory import RunDirectory
from perfed.runs.tables import quantity

LEAST_IMPORTANT = ("best test*", "parameters", "worst 10 %")
"""Columns that a narrow terminal does without, the first first."""
GAP = 2  # between two columns
SILENCE = 30.0  # seconds, without a terminal


class Display(Callback):
    """On stderr: a live bar per run in a terminal, elsewhere a plain line for every tenth of the
    rounds, and at least one in every 30 seconds; before them where the runs are, and from where a
    resumed one goes on."""

    def __init__(
        self, folder: Path | None = None, resuming: bool = False, names: bool = False
    ) -> None:
        self.folder = folder
        """Of all runs; of a new one, known once it is begun."""
        self._resuming = resuming
        self._names = names  # of experiments, where runs are of several
        self._console = console = Console(stderr=True)
        self._bars: Progress | None = None
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("round {task.completed}/{task.total}"),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
                console=console,
            )
        self._began: dict[str, tuple[float, int]] = {}
        self._tasks: dict[str, TaskID] = {}
        self._opened = self._told = time.monotonic()
        self._now = "preparing"
        self._over = threading.Event()

    def __enter__(self) -> Display:
        if self._bars:
            self._bars.start()
        else:
            threading.Thread(target=self._stay_alive, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._bars:
            self._bars.stop()

    def _stay_alive(self) -> None:
        """Say something now and then, however long a round takes: a log that stands still looks
        like a program that does."""
        while not self._over.wait(max(0.05, self._told + SILENCE - time.monotonic())):
            if time.monotonic() - self._told >= SILENCE:
                self._tell(f"{self._now}; {time.monotonic() - self._opened:.0f} s so far")

    def begin(self, what: str) -> None:
        """Where runs go on elsewhere: say what they are, and go on saying that they do."""
        self._now = what
        self._tell(f"study directory: {self.folder}; {what}")

    def tell(self, line: str) -> None:
        self._tell(line)

    def on_start(self, experiment: Experiment, directory: Path, first_round: int) -> None:
        name = self._run_title(experiment)
        first_run = not self._began
        if first_run:
            self.folder = self.folder or _whole(directory)
            self._tell(self._whereabouts(experiment, directory, first_round))
            self._tell_networks(directory)
        if first_round:
            self._tell(f"{name}: continuing after round {first_round} of {experiment.rounds}")
        elif self._resuming and first_run:
            self._tell(f"{name}: from the start: no checkpoint yet")
        self._began[name] = (time.monotonic(), first_round)
        self._now = f"{name}: in round {first_round + 1}/{experiment.rounds}"
        if self._bars:
            self._tasks[name] = self._bars.add_task(
                name, total=experiment.rounds, completed=first_round, facts=""
            )

    def on_round(self, report: RoundReport) -> None:
        name = self._run_title(report.experiment)
        done, total = report.round + 1, report.experiment.rounds
        accuracy = "" if report.accuracy is None else f"accuracy {100 * report.accuracy:.1f} %  "
        facts = accuracy + quantity(report.traffic.bytes, "B").rjust(7)
        self._now = f"{name}: in round {done + 1}/{total}" if done < total else f"{name}: ending"
        if self._bars:
            self._bars.update(self._tasks[name], completed=done, facts=facts)
        elif done == total or done % max(1, total // 10) == 0:
            began, first = self._began[name]
            pace = (time.monotonic() - began) / (done - first)
            left = f"{pace * (total - done):.0f} s left" if done < total else "done"
            self._tell(f"{name}: round {done}/{total}  {facts}  {left}")

    def _whereabouts(self, experiment: Experiment, directory: Path, first_round: int) -> str:
        """Where the runs are, and of those that begin now how they are executed."""
        line = f"run directory: {self.folder}; experiment {experiment.name}"
        if self._resuming or first_round:  # what it was begun on need not be what it goes on on
            return line
        machine = RunDirectory(directory).read_json("environment.json")
        return f"{line}, engine {machine['engine']}, device {machine['device']}"

    def _tell_networks(self, directory: Path) -> None:
        """Which clients have which network."""
        partition = RunDirectory(directory).read_json("partition.json")
        if "architectures" in partition:
            for line in networks_table(partition):
                self._tell(line)

    def _run_title(self, experiment: Experiment) -> str:
        title = f"{experiment.algorithm.label()}, seed {experiment.seed}"
        return f"{experiment.name}: {title}" if self._names else title

    def _tell(self, line: str) -> None:
        self._told = time.monotonic()
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def conducting(folder: Path, names: bool = False) -> Iterator[Display]:
    """Around the runs of a study: what is shown meanwhile, and what is said when it is stopped."""
    with Display(folder, names=names) as display:
        try:
            yield display
        except SystemExit as error:  # it would look like a study that has ended well
            raise RunError(
                f"code of your own ended Python (sys.exit({shown(error.code)}))"
            ) from None
        except KeyboardInterrupt as stop:
            tell("\ninterrupted; the same command goes on")
            raise typer.Exit(exit_code(stop)) from None


def _whole(directory: Path) -> Path:
    """The folder of the comparison that a run is of, or of the run itself."""
    return directory.parent if (directory.parent / COMPARISON_FILE).is_file() else directory


def networks_table(partition: Mapping[str, Any]) -> list[str]:
    """A line for each architecture: how large it is, how many clients have it, and which."""
    networks = partition["architectures"]
    width = max(len("network"), *map(len, networks))
    lines = [f"{'network':<{width}}  {'parameters':>10}  clients"]
    for label, facts in sorted(networks.items(), key=lambda item: item[1]["parameters"]):
        who = [n for n, c in enumerate(partition["clients"]) if c["architecture"] == label]
        size = f"{facts['parameters']:>10,}"
        # Where only some clients are written down, who the others are is not known.
        which = "" if "numbers" in partition else f"  ({ranges(who)})"
        lines.append(f"{label:<{width}}  {size}  {facts['clients']:>7}{which}")
    return lines


def ranges(numbers: Sequence[int], longest: int = 60) -> str:
    """``0-3, 7, 9-11``, cut where it gets long."""
    pieces: list[list[int]] = []
    for number in numbers:
        if pieces and pieces[-1][-1] == number - 1:
            pieces[-1].append(number)
        else:
            pieces.append([number])
    text = ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in pieces)
    return text if len(text) <= longest else text[:longest].rpartition(",")[0] + ", …"


def print_tables(tables: Sequence[Table]) -> None:
    console = Console()
    for table in tables:
        if console.is_terminal:
            _print_in_terminal(console, narrowed(table, console.width))
        else:  # as wide as it needs to be, for a file or a pipe
            print(f"\n{table.text()}", flush=True)
    console.print()


def narrowed(table: Table, width: int) -> Table:
    """The table without the columns that ``width`` has no room for, as far as it can do without."""
    shown, left_out = table, []
    for title in LEAST_IMPORTANT:
        if _width(_natural_widths(shown)) <= width:
            break
        if title in shown.header:
            shown = _without(shown, title)
            left_out.append(title)
    if not left_out:
        return table
    note = f"{shown.note} Not shown, for lack of space: {', '.join(left_out)}."
    return dataclasses.replace(shown, note=note)


def _without(table: Table, title: str) -> Table:
    column = list(table.header).index(title)
    header, *rows = [[*line[:column], *line[column + 1 :]] for line in (table.header, *table.rows)]
    return dataclasses.replace(table, header=header, rows=rows)


def _natural_widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]


def _width(columns: Sequence[int]) -> int:
    return sum(columns) + GAP * (len(columns) - 1)


def _print_in_terminal(console: Console, table: Table) -> None:
    """Where there is still no room the first column is folded, at spaces; where that does not
    help, the terminal folds the lines."""
    widths = _natural_widths(table)
    words = [word for line in (table.header, *table.rows) for word in line[0].split()]
    room = console.width - _width([0, *widths[1:]])
    if room >= max(map(len, words)):
        widths[0] = min(widths[0], room)
    if table.title:
        console.print(f"\n{table.title}", style="bold", highlight=False, markup=False)
    else:
        console.print()
    _print_cells(console, table, widths)
    note = " ".join(table.note.split())  # wrapped for a file, it would be wrapped a second time
    console.print(note, style="dim", highlight=False, markup=False)


def _print_cells(console: Console, table: Table, widths: Sequence[int]) -> None:
    shown = rich.table.Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for number, (title, width) in enumerate(zip(table.header, widths, strict=True)):
        side: JustifyMethod = "left" if number < table.names else "right"
        shown.add_column(Text(title), justify=side, no_wrap=number > 0, width=width)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    wide = Console(width=max(console.width, _width(widths)))
    wide.print(shown, crop=False)
