"""A configuration to start from: what ``perfed init`` writes.

It looks at the data, chooses numbers that fit it, checks that the result runs, and writes every key
with its meaning beside it, from the definitions that also check them.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfed.config import Comparison, Experiment, parse
from perfed.core.algorithm import algorithms
from perfed.core.errors import ConfigError, PerfedError, did_you_mean, shape_text
from perfed.core.paths import expanded
from perfed.core.registry import Component
from perfed.core.schema import Options, plain
from perfed.core.tensorfile import write_atomically
from perfed.data import Samples, datasets
from perfed.data.readers import class_folders
from perfed.data.tables import (
    COMMA_NUMBER,
    MANY_WORDS,
    is_number,
    likely_separator,
    read_sheet,
)
from perfed.explain import described
from perfed.runs.simulation import Simulation

DATA_QUESTION = "Where is the data? (a folder of images by class, .csv, .npz, file.py:Dataset)"
ALGORITHMS = "majority, local, perfed-ckt, perfed-kin"
HUB = "hub:"
SMALL, LARGE = 32, 64  # images larger than the one are made as small as the other
PUBLIC_SHARE, MOST_PUBLIC = 0.2, 1000
SAMPLES_A_CLIENT, MOST_CLIENTS = 30, 20
MINIMUM = 20
WIDTH = 100
LIKELY_TARGETS = ("label", "target", "class", "y")
IDS = ("id", "ids", "uuid", "guid", "index", "key", "nr", "number")
DATE = re.compile(r"\s*(\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4})\b")


def recognise(text: str) -> dict[str, Any]:
    """The dataset that a word or path stands for, as a configuration says it."""
    path = expanded(text, "--data")
    if text.startswith(HUB):
        return {"name": "huggingface", "path": text.removeprefix(HUB)}
    if path.is_dir():
        return _recognise_folder(path, text)
    for name, endings in _endings().items():
        if path.suffix.lower() in endings:
            return _with_separator({"name": name, "path": text}, path)
    if ":" in text:
        return {"name": "torch", "path": text}
    if text in datasets and not hasattr(datasets[text], "path"):
        return {"name": text}
    known = [name for name in datasets if not hasattr(datasets[name], "path")]
    raise ConfigError(f"no such file or folder: {text!r}{did_you_mean(text, known)}", "--data")


def _recognise_folder(path: Path, text: str) -> dict[str, Any]:
    if class_folders(path):
        return {"name": "images", "path": text}
    entries = sorted(path.iterdir())
    if any(class_folders(entry) for entry in entries if entry.is_dir()):
        return {"name": "images", "path": text, "by_client": True}
    for name, endings in _endings().items():
        if any(entry.suffix.lower() == endings[0] for entry in entries):
            first = next(entry for entry in entries if entry.suffix.lower() == endings[0])
            return _with_separator({"name": name, "path": text, "by_client": True}, first)
    files = " or ".join(endings[0] for endings in _endings().values())
    raise ConfigError(
        f"{path} holds neither folders of images by class nor a {files} file for each client",
        "--data",
    )


def _with_separator(source: dict[str, Any], file: Path) -> dict[str, Any]:
    """Spreadsheets write semicolons where numbers have a decimal comma."""
    separator = likely_separator(file) if source["name"] == "csv" else ","
    return source if separator == "," else {**source, "separator": separator}


def _endings() -> dict[str, tuple[str, ...]]:
    """By dataset, the endings of the names of its files."""
    found = {name: getattr(datasets[name], "endings", ()) for name in sorted(datasets)}
    return {name: endings for name, endings in found.items() if endings}


def _one_sheet(source: Mapping[str, Any]) -> Path:
    """Of the clients' tables, if each has its own, the first."""
    path = expanded(source["path"], "--data")
    if not source.get("by_client"):
        return path
    return min(entry for entry in path.iterdir() if entry.suffix.lower() == ".csv")


def likely_target(source: Mapping[str, Any]) -> str:
    """The label column, by its name, or else the last one."""
    try:
        columns = list(read_sheet(_one_sheet(source), source.get("separator", ",")).columns)
    except PerfedError:  # what is wrong is said when the data is read
        return LIKELY_TARGETS[0]
    by_name = {column.lower(): column for column in columns}
    return next((by_name[name] for name in LIKELY_TARGETS if name in by_name), columns[-1])


def names_of_rows(source: Mapping[str, Any]) -> list[str]:
    """Columns that name or date a row and say nothing of its label: a network would learn the rows
    by heart. Ids by their name, or words, if all differ, and dates by how they look."""
    try:
        columns = read_sheet(_one_sheet(source), source.get("separator", ",")).columns
    except PerfedError:  # what is wrong is said when the data is read
        return []
    return [
        name
        for name, cells in columns.items()
        if name != source["target"] and (_is_id(name, cells) or all(map(DATE.match, cells)))
    ]


def _is_id(name: str, cells: Sequence[str]) -> bool:
    if len(set(cells)) < len(cells):
        return False
    words = re.split(r"[\W_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
    return words[-1] in IDS or (
        len(cells) > MANY_WORDS
        and not any(is_number(cell) or COMMA_NUMBER.fullmatch(cell) for cell in cells)
    )


def several(text: str) -> list[str]:
    return [piece.strip() for piece in text.split(",") if piece.strip()]


def whole_number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{text!r} is not a whole number, 1 or more", "--clients")
    return int(text)


@dataclass(frozen=True)
class Start:
    """Data that has been looked at."""

    data: dict[str, Any]
    samples: Samples

    @classmethod
    def look(cls, data: Mapping[str, Any]) -> Start:
        """Read it; images of many sizes, or large ones, become small ones."""
        values = dict(data)
        resizable = "size" in {field.name for field in dataclasses.fields(datasets[data["name"]])}
        try:
            samples = datasets.build(values).load(0)
        except ConfigError as error:
            if not resizable or "one size" not in error.message:
                raise
            samples = None
        if resizable and (samples is None or max(samples.x.shape[2:], default=0) > LARGE):
            values["size"] = [SMALL, SMALL]
            samples = datasets.build(values).load(0)
        assert samples is not None
        start = cls(values, samples)
        if not len(samples.public_x):
            public = max(1, min(MOST_PUBLIC, int(PUBLIC_SHARE * len(samples.x))))
            return start._with_public(public)
        return start

    def _with_public(self, public: int) -> Start:
        values = self.data | {"public": public}
        return Start(values, datasets.build(values).load(0))

    @property
    def named_clients(self) -> int:
        """How many the data itself names; none, mostly."""
        if self.samples.client_ids is None:
            return 0
        return len(np.unique(self.samples.client_ids))

    def likely_clients(self) -> int:
        return max(2, min(MOST_CLIENTS, len(self.samples.x) // SAMPLES_A_CLIENT))

    def likely_model(self) -> str:
        shape, tokens = self.samples.x.shape[1:], self.samples.tokens
        if tokens and tokens.declared:
            return "token-mean"
        return "cnn" if len(shape) == 3 and min(shape[1:]) >= 8 else "mlp"

    def described(self) -> str:
        shape = shape_text(self.samples.x.shape[1:])
        of = f"{shape} numbers" if self.samples.x.ndim == 2 else shape
        names = self.samples.origin.get("classes", [])
        few = f" ({', '.join(names[:5])}{', …' if len(names) > 5 else ''})" if names else ""
        return (
            f"{len(self.samples.x):,} samples of {of}, {self.samples.classes} classes{few}, "
            f"{len(self.samples.public_x):,} public"
        )

    def experiment(
        self, name: str, clients: int, methods: Sequence[str], models: Sequence[str]
    ) -> Experiment | Comparison:
        """Numbers that fit the data; an error where something given does not."""
        selected = min(10, clients)  # all, where they are few: local training trains all, too
        minimum = max(3, min(MINIMUM, len(self.samples.x) // clients // 2))
        partition: Any = {"name": "dirichlet", "alpha": 0.1, "minimum": minimum}
        values: dict[str, Any] = {
            "name": re.sub(r"[^\w.+=-]", "-", name) or "experiment",
            "about": "Written by perfed init.",
            "rounds": 50,
            "clients": clients,
            "clients_per_round": selected,
            "data": self.data,
            "partition": "given" if self.named_clients else partition,
            "split": {"train": [0.6], "validation": 0.1, "test": 0.3},
            # Of its own a client has few; where perfed deals, others' are like them.
            "shared_test": not self.named_clients,
            "models": list(models),
        }
        chosen = [_fitting(method, min(10, -(-clients // 2))) for method in methods]
        one = {"algorithm": chosen[0]} if len(chosen) == 1 else {"algorithms": chosen}
        what = parse(values | one)
        for experiment in what.experiments() if isinstance(what, Comparison) else [what]:
            Simulation(experiment)  # what cannot run is not written
        return what


def _fitting(method: str, most: int) -> dict[str, Any]:
    """A method with no more clusters than so many."""
    clusters = getattr(algorithms.build(method), "clusters", 0)
    fewer = {"clusters": most} if clusters > most else {}
    return {"name": method} | fewer


def write(file: Path, what: Experiment | Comparison) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, commented(what).encode())


def commented(what: Experiment | Comparison) -> str:
    """As YAML, every key with its meaning."""
    lines = [
        "# Every key, with its meaning. What else one may be: perfed explain KEY",
        "# One key changed for one run: perfed run FILE --set training.learning_rate=0.1",
    ]
    if isinstance(what, Comparison):
        lines += _fields(what.experiment, "", without=("algorithm", "seed"))
        lines += _fields(what, "", without=("experiment",))
    else:
        lines += _fields(what, "")
    return "\n".join(lines) + "\n"


def _fields(options: Options, indent: str, without: Sequence[str] = ()) -> Iterator[str]:
    for field in dataclasses.fields(options):
        if field.name in without:
            continue
        value, comment = getattr(options, field.name), described(type(options), field)
        if isinstance(value, Options) and field.name != "public":
            yield from _said(f"{indent}{field.name}:", comment, indent)
            yield from _inside(value, indent + "  ")
        elif isinstance(value, tuple) and value and isinstance(value[0], Options):
            yield from _said(f"{indent}{field.name}:", comment, indent)
            for item in value:
                first, *rest = _inside(item, indent + "    ")
                yield f"{indent}  - {first.strip()}"
                yield from rest
        else:
            yield from _said(f"{indent}{field.name}: {_flow(value)}", comment, indent)


def _inside(options: Options, indent: str) -> Iterator[str]:
    if isinstance(options, Component):
        yield f"{indent}name: {_flow(plain(options)['name'])}"
    yield from _fields(options, indent)


def _said(line: str, comment: str, indent: str) -> Iterator[str]:
    """A comment beside the line where there is room, or else above it."""
    if len(line) + len(comment) + 4 <= WIDTH:
        yield f"{line}  # {comment}"
        return
    yield from textwrap.wrap(
        comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )
    yield line


def _flow(value: Any) -> str:
    import yaml

    text: str = yaml.safe_dump(
        [plain(value)], default_flow_style=True, allow_unicode=True, width=float("inf")
    )
    return text.strip()[1:-1]
