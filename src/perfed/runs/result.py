"""What a run found, read from its directory: the same whether it has just ended or long ago."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from perfed.config import Experiment
from perfed.core.errors import RunError
from perfed.core.inputs import Inputs
from perfed.core.layout import Table
from perfed.core.network import Between
from perfed.core.schema import from_mapping, plain
from perfed.core.tree import OWN
from perfed.data.needs import Needs
from perfed.engines.population import sized
from perfed.models import architectures, find_head
from perfed.runs.directory import FEDERATION, RunDirectory
from perfed.runs.drawing import drawing
from perfed.runs.model_file import Blueprint, Part, load_with
from perfed.runs.settings import read_experiment, refuse_changes

if TYPE_CHECKING:
    import pandas as pd


def headline(by_kind: Mapping[str, Any]) -> Any:
    """Of a client's personal and its global model, the one it would use."""
    return by_kind[headline_kind(by_kind)]


def headline_kind(kinds: Container[str]) -> str:
    return "personal" if "personal" in kinds else "global"


class Result:
    """A run's outcome."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory)
        self.directory = RunDirectory(self.path)
        """The files behind it: ``result.directory.lines("rounds.jsonl")``."""
        self.experiment: Experiment = read_experiment(self.path)
        refuse_changes(self.directory, self.experiment)

    @property
    def results(self) -> list[Result]:
        """Itself: a comparison of one, none of which failed."""
        return [self]

    @property
    def failures(self) -> list[str]:
        return []

    @property
    def summary(self) -> dict[str, Any]:
        """The final numbers of a finished run, or those so far."""
        if self.directory.finished:
            summary: dict[str, Any] = self.directory.read_json("summary.json")
            return summary
        return self.summarize()

    def summarize(self) -> dict[str, Any]:
        """The numbers so far, from the lines of the run.

        ``last`` is the last evaluated round, ``chosen`` the one with the best mean *validation*
        accuracy (the earliest of equals); ``validation_is_used`` says where the algorithm has seen
        these samples itself, so that the choice flatters. ``best_test`` is what the paper reports;
        it is chosen by test data, so it flatters, and is no result.
        """
        lines = self.directory.lines("rounds.jsonl")
        evaluated = [line for line in lines if "evaluation" in line]
        if not evaluated and len(lines) and lines[-1]["round"] + 1 == self.experiment.rounds:
            evaluated = [lines[-1] | {"evaluation": {}}]  # sites that keep their numbers
        if not evaluated:
            raise RunError(f"{self.path} has no evaluated round yet")
        return {
            "name": self.experiment.name,
            "algorithm": self.experiment.algorithm.label(),
            "seed": self.experiment.seed,
            "rounds": evaluated[-1]["round"] + 1,
            "finished": evaluated[-1]["round"] + 1 == self.experiment.rounds,
            **({"validation_is_used": True} if self.experiment.validation_is_used else {}),
            "models": {
                kind: {
                    "last": _at(evaluated[-1], kind),
                    "chosen": _best(evaluated, kind, "validation_accuracy"),
                    "best_test": _best(evaluated, kind, "test_accuracy"),
                }
                for kind in evaluated[-1]["evaluation"]
            },
            "traffic": evaluated[-1]["traffic_total"],
            **({"privacy": evaluated[-1]["privacy"]} if "privacy" in evaluated[-1] else {}),
        }

    def record(self) -> dict[str, Any]:
        """All one needs to quote the run: its numbers, configuration and machine."""
        return {
            "summary": self.summary,
            "config": self.experiment.to_mapping(),
            "environment": self.directory.read_json("environment.json"),
            "directory": str(self.path),
        }

    def per_round(self) -> pd.DataFrame:
        """A row per evaluated round and model kind, with traffic so far."""
        import pandas as pd

        rows = []
        for line in self.directory.lines("rounds.jsonl"):
            for kind, numbers in line.get("evaluation", {}).items():
                flat = {k: v for k, v in numbers.items() if not isinstance(v, dict)}
                rows.append({"round": line["round"], "model": kind, **flat, **_total(line)})
        return pd.DataFrame(rows)

    def per_client(self) -> pd.DataFrame:
        """A row per evaluated round, model kind and client, with each metric that was recorded,
        with the client's group where there is a shift, and with a minimum whether its samples were
        moved to it to reach that; and whether it was hostile, where some were."""
        import pandas as pd

        partition = self.directory.read_json("partition.json")
        clients = partition["clients"]
        kinds = kinds_of_clients(partition)
        numbers = partition.get("numbers", range(len(clients)))
        rows = [
            {
                "round": line["round"],
                "model": kind,
                "client": numbers[place],
                "architecture": client["architecture"],
                "train_size": part_size(client, "train"),
                "test_size": part_size(client, "test"),
                **{name: values[place] for name, values in kinds.items()},
                **{name: values[place] for name, values in columns.items()},
            }
            for line in self.directory.lines("clients.jsonl")
            for kind, columns in line.items()
            if kind != "round"
            for place, client in enumerate(clients)
            if client and columns["test_accuracy"][place] is not None  # a site that has joined
        ]
        return pd.DataFrame(rows)

    def model(self, client: int, kind: str | None = None) -> nn.Module:
        """A client's final model, in evaluation mode (personal where there is one)."""
        if not (self.path / "models").is_dir():
            raise RunError(f"{self.path} has no models: {self._where_models_are()}")
        with self.directory.reading():
            return self._model(client, kind)

    def model_clients(self) -> list[int]:
        """Whose models there are."""
        if not (self.path / "models").is_dir():
            raise RunError(f"{self.path} has no models: {self._where_models_are()}")
        index = self.directory.read_json("models/index.json")
        return list(index.get("numbers", range(len(index["clients"]))))

    def _model(self, client: int, kind: str | None) -> nn.Module:
        index = self.directory.read_json("models/index.json")
        numbers = index.get("numbers", range(len(index["clients"])))
        if client not in numbers:
            some = "those evaluated" if "numbers" in index else "they"
            raise RunError(f"no client {client}: {some} are {numbers[0]} … {numbers[-1]}")
        entry = index["clients"][numbers.index(client)]
        files = entry["models"]
        if kind is not None and kind not in files:
            raise RunError(f"client {client} has no {kind} model, only {', '.join(files)}")
        file = self.path / "models" / (files[kind] if kind else headline(files))
        return load_with(file, self._blueprint(index, entry).make)

    def needs(self) -> Needs:
        """What samples the models take."""
        with self.directory.reading():
            index = self.directory.read_json("models/index.json")
            if "needs" in index:
                return from_mapping(Needs, index["needs"])
            # An earlier version: pixels were bytes, or nobody knows.
            partition = self.directory.read_json("partition.json")
            scales, data = partition.get("standardised", {}), partition.get("data", {})
            return Needs(
                shape=tuple(index["input_shape"]),
                classes=index["classes"],
                names=tuple(data.get("classes", ())),
                vocabulary=index.get("vocabulary", 0),
                columns=tuple(data.get("columns", ())),
                mean=tuple(scales.get("mean", ())),
                deviation=tuple(scales.get("deviation", ())),
                pixels=() if scales else (-1.0, 1.0),
            )

    def _blueprint(self, index: Mapping[str, Any], entry: Mapping[str, Any]) -> Blueprint:
        """Of a client's models; the size of a network between others follows from theirs."""
        vocabulary = index.get("vocabulary", 0)  # earlier versions had numbers alone
        inputs = Inputs.with_vocabulary(index["input_shape"], vocabulary)
        known = {OWN: index["architectures"][entry["architecture"]]} | index.get("networks", {})
        parts = {name: Part(a, inputs, index["classes"]) for name, a in known.items()}

        def width(network: str) -> int:
            architecture = architectures.build(known[network])
            return find_head(architecture, parts[network].build()[0], inputs)[1]

        for name, one in index.get("between", {}).items():
            architecture, taken, given = sized(Between(**one), width)
            parts[name] = Part(plain(architecture), taken, given, between=True)
        card = {"run": self.experiment.name, "method": self.experiment.algorithm.label()}
        return Blueprint(parts, self.needs(), card)

    def _where_models_are(self) -> str:
        if (self.path / FEDERATION).is_file():
            return "they are at their sites"
        if self.directory.finished:
            return "it was told to keep none"
        if self.directory.failure:
            return self.directory.failure
        return f"they come at its end: perfed run --resume {self.path}"

    def table(self) -> str:
        """The summary as plain text."""
        return self.tables()[0].text()

    def tables(self) -> list[Table]:
        from perfed.runs.tables import summary  # it needs results itself

        numbers = self.summary
        table = summary([numbers])
        clients, some = self.experiment.clients, self.experiment.evaluate_clients
        if some:
            note = f"{table.note}\n{some:,} of {clients:,} clients are evaluated."
            table = dataclasses.replace(table, note=note)
        if hostile := hostile_words_of([self]):
            table = dataclasses.replace(table, note=f"{table.note}\n{hostile}")
        if numbers["finished"]:
            return [table]
        so_far = f"Not finished: after round {numbers['rounds']} of {self.experiment.rounds}."
        if self.directory.failure:
            so_far += f" It diverged: {self.directory.failure}."
        return [dataclasses.replace(table, note=f"{table.note}\n{so_far}")]

    def plot(self, path: str | Path | None = None) -> Path:
        """Accuracy by round and by communication, as a PNG or PDF file."""
        return drawing().plot([self], Path(path or self.path / "accuracy.png"))

    def report(self, path: str | Path | None = None) -> Path:
        """All there is to see of it, as one HTML file."""
        return drawing().page([self.path], Path(path or self.path / "report.html"))

    def __repr__(self) -> str:
        return f"Result({str(self.path)!r})"


def _total(line: Mapping[str, Any]) -> dict[str, int]:
    return {f"total_{name}": value for name, value in line["traffic_total"].items()}


def part_size(client: Mapping[str, Any], part: str) -> int:
    """Of a site with data of its own no more is known than how much it has."""
    size: int = client["sizes"][part] if "sizes" in client else len(client[part])
    return size


def kinds_of_clients(partition: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What tells clients apart, beside what they have, as far as a partition records it."""
    names = {"groups": "group", "repaired": "repaired", "hostile": "hostile"}
    return {name: partition[key] for key, name in names.items() if key in partition}


def hostile_words(masks: Iterable[Sequence[bool]], some_evaluated: bool) -> str:
    """What is said below a table, of masks of hostile clients; nothing where there are none."""
    counts = {sum(mask) for mask in masks}
    if not counts:
        return ""
    fewest, most = min(counts), max(counts)
    number = f"{most}" if fewest == most else f"{fewest} to {most}"
    whose = "of the evaluated clients" if some_evaluated else "client" if most == 1 else "clients"
    return f"{number} {whose} {'is' if most == 1 else 'are'} hostile; all means are of the others."


def hostile_words_of(runs: Sequence[Result]) -> str:
    masks = [
        run.directory.read_json("partition.json")["hostile"]
        for run in runs
        if run.experiment.hostile is not None
    ]
    return hostile_words(masks, any(run.experiment.evaluate_clients for run in runs))


def _at(line: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"round": line["round"], **line["evaluation"][kind]}


def _best(lines: list[dict[str, Any]], kind: str, by: str) -> dict[str, Any]:
    best = max(lines, key=lambda line: (line["evaluation"][kind][by], -line["round"]))
    return _at(best, kind)
