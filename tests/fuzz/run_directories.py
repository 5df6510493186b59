"""Run directories: everything that reads one, with one file of it changed."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

import perfed
from perfed.report import gather
from perfed.report.export import frames
from perfed.runs.checkpoint import Checkpoints
from perfed.runs.directory import RunDirectory
from tests.conftest import tiny
from tests.fuzz.target import ODD_JSON, Target


class RunDirectories(Target):
    """The first byte is the file, the rest its content."""

    tokens = (
        *ODD_JSON,
        *(
            b'"round"',
            b'"clients"',
            b'"evaluation"',
            b'"personal"',
            b'"files"',
            b'"checksum"',
            b"\n",
        ),
        *(
            b'"traffic_total"',
            b'"refused"',
            b'{"round":0}\n',
            b"\xff",
            b": ",
            b"null\n",
            b"[" * 2000,
        ),
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        experiment = tiny(rounds=2, clients=2, clients_per_round=2)
        how = perfed.Execution(checkpoint_seconds=0)
        perfed.run(experiment, folder / "finished", how=how)
        with contextlib.suppress(KeyboardInterrupt):
            perfed.run(experiment, folder / "begun", how=how, callbacks=[_Interrupt()])
        runs = (folder / "finished", folder / "begun")
        files = sorted(path for run in runs for path in run.rglob("*") if path.is_file())
        self.content = {path: path.read_bytes() for path in files if path.name[0] != "."}
        self.files = list(self.content)
        self.table = perfed.Result(folder / "finished").table()

    def seeds(self) -> list[bytes]:
        return [bytes([number]) + self.content[file] for number, file in enumerate(self.files)]

    def read(self, data: bytes) -> None:
        file = self.files[data[0] % len(self.files)] if data else self.files[0]
        file.write_bytes(data[1:])
        try:
            run = self.folder / file.relative_to(self.folder).parts[0]
            self._read(run)
            if run.name == "finished" and file.name != "config.yaml":  # with its name and method
                assert perfed.Result(run).table() == self.table, "other numbers"
        finally:
            file.write_bytes(self.content[file])

    def _read(self, path: Path) -> None:
        result = perfed.Result(path)
        result.table()
        (run,) = gather.read([path])
        gather.series([run])
        frames([run])
        assert run.title
        assert len(run.train_sizes) == len(run.clients)
        if path.name == "begun":
            Checkpoints(RunDirectory(path)).load(torch.device("cpu"))
        else:
            result.model(0)


class _Interrupt(perfed.Callback):
    def on_round(self, report: perfed.runs.RoundReport) -> None:
        raise KeyboardInterrupt
