"""Several algorithms and seeds, each a run directory of its own inside one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfed.config import Comparison, Experiment, parse, read_mapping
from perfed.core.errors import Diverged, RunError
from perfed.runs.directory import RunDirectory, default_path, make_directory
from perfed.runs.result import Result
from perfed.runs.simulation import CHECKPOINT_SECONDS, Callback, Simulation, resume, run

FILE = "comparison.yaml"
FAILED = "failed.json"


class ComparisonResult:
    """The runs of a comparison, those there are so far, and which of them failed."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self.comparison = read_comparison(self.path)
        self.results = [
            Result(folder)
            for experiment in self.comparison.experiments()
            if ((folder := self.path / run_name(experiment)) / "summary.json").is_file()
        ]
        self.failures = [
            f"{experiment.algorithm.label()}, seed {experiment.seed}, has no result: "
            + str(RunDirectory(folder).read_json(FAILED)["error"])
            for experiment in self.comparison.experiments()
            if ((folder := self.path / run_name(experiment)) / FAILED).is_file()
        ]

    def table(self) -> str:
        """Mean ± standard deviation over seeds, a row per algorithm and model."""
        from perfed.report.tables import summary_table

        return "\n".join(
            [summary_table([result.summary for result in self.results]), *self.failures]
        )

    def record(self) -> dict[str, Any]:
        """All one needs to quote the comparison: its numbers, configuration and machine."""
        machines = [result.record()["environment"] for result in self.results]
        return {
            "runs": [result.summary for result in self.results],
            "failures": self.failures,
            "config": self.comparison.to_mapping(),
            "environment": machines[0] if machines else {},
            "directory": str(self.path),
        }

    def plot(self, path: str | Path | None = None) -> Path:
        """Accuracy by round and by communication, as a PNG or PDF file."""
        from perfed.report.figures import plot_comparison

        return plot_comparison(self.results, Path(path or self.path / "comparison.png"))


def read_comparison(path: Path) -> Comparison:
    if not (path / FILE).is_file():
        raise RunError(f"{path} is not a comparison: it has no {FILE}")
    comparison = parse(read_mapping(path / FILE))
    if not isinstance(comparison, Comparison):
        raise RunError(f"{path / FILE} lists no algorithms or seeds")
    return comparison


def run_name(experiment: Experiment) -> str:
    """A folder name: the algorithm with its options, and the seed."""
    kept = (c if c.isalnum() or c in "-=." else " " for c in experiment.algorithm.label())
    return f"{'-'.join(''.join(kept).split())}-seed{experiment.seed}"


def compare(
    comparison: Comparison,
    directory: str | Path | None = None,
    *,
    callbacks: Sequence[Callback] = (),
    device: str = "cpu",
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> ComparisonResult:
    """Run every algorithm with every seed, in a new directory."""
    first = comparison.experiments()[0]
    for experiment in comparison.experiments():  # what cannot run must not start
        if experiment.algorithm == first.algorithm or experiment.seed == first.seed:
            Simulation(experiment, device=device)
    path = Path(directory) if directory else default_path(comparison.experiment.name)
    make_directory(path)
    RunDirectory(path).write_yaml(FILE, comparison.to_mapping())
    return resume_comparison(
        path, callbacks=callbacks, device=device, checkpoint_seconds=checkpoint_seconds
    )


def resume_comparison(
    directory: str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    device: str = "cpu",
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> ComparisonResult:
    """Run what is not finished. A method that diverges is recorded, and the others go on."""
    path = Path(directory)
    common: dict[str, Any] = {
        "callbacks": callbacks,
        "device": device,
        "checkpoint_seconds": checkpoint_seconds,
    }
    for experiment in read_comparison(path).experiments():
        folder = path / run_name(experiment)
        if (folder / FAILED).is_file() or (folder / "summary.json").is_file():
            continue
        try:
            if (folder / "config.yaml").is_file():
                resume(folder, **common)
            else:
                _remove_unstarted(folder)
                run(experiment, folder, **common)
        except Diverged as error:
            RunDirectory(folder).write_json(FAILED, {"error": str(error)})
    return ComparisonResult(path)


def _remove_unstarted(folder: Path) -> None:
    """A run killed before it wrote its configuration has nothing in it worth keeping."""
    if folder.is_dir():
        for file in folder.iterdir():
            file.unlink()
