"""What is shown while runs go on, and of their end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from perfed.config import Experiment
from perfed.report.layout import Table
from perfed.report.tables import quantity
from perfed.runs import Callback, RoundReport
from perfed.runs.directory import RunDirectory


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
        self._told_networks = False

    def __enter__(self) -> Display:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def on_start(self, experiment: Experiment, directory: Path, first_round: int) -> None:
        self._tell_networks(directory)
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

    def _tell_networks(self, directory: Path) -> None:
        """Which clients have which network; of several runs, those of the first."""
        partition = RunDirectory(directory).read_json("partition.json")
        if self._told_networks or "architectures" not in partition:
            return
        self._told_networks = True
        for line in networks_table(partition):
            self._console.print(line, soft_wrap=True, highlight=False, markup=False)


def networks_table(partition: Mapping[str, Any]) -> list[str]:
    """A line for each architecture: how large it is, how many clients have it, and which."""
    networks = partition["architectures"]
    width = max(len("network"), *map(len, networks))
    lines = [f"{'network':<{width}}  {'parameters':>10}  clients"]
    for label, facts in sorted(networks.items(), key=lambda item: item[1]["parameters"]):
        who = [n for n, c in enumerate(partition["clients"]) if c["architecture"] == label]
        size = f"{facts['parameters']:>10,}"
        lines.append(f"{label:<{width}}  {size}  {facts['clients']:>7}  ({ranges(who)})")
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


def _run_title(experiment: Experiment) -> str:
    return f"{experiment.algorithm.label()}, seed {experiment.seed}"


def print_tables(console: Console, tables: Sequence[Table]) -> None:
    for table in tables:
        if console.is_terminal:
            _print_in_colour(console, table)
        else:  # as wide as it needs to be, for a file or a pipe
            print(f"\n{table.text()}", flush=True)
    console.print()


def _print_in_colour(console: Console, table: Table) -> None:
    shown = rich.table.Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    for number, title in enumerate(table.header):
        words = number < table.names
        shown.add_column(
            title, justify="left" if words else "right", no_wrap=number != 0, overflow="fold"
        )
    for row in table.rows:
        shown.add_row(*row)
    console.print(f"\n[bold]{table.title}[/bold]" if table.title else "")
    console.print(shown)
    console.print(f"[dim]{table.note}[/dim]", highlight=False)
