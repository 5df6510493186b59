"""What a model says about files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfed.core.errors import ConfigError, one_line
from perfed.core.layout import Table
from perfed.core.tensorfile import write_atomically
from perfed.use.opening import Ready

SURE = 0.8
"""The probability from which a model counts as sure, unless told otherwise."""
UNSURE = "unsure"


@dataclass(frozen=True)
class Prediction:
    """Of one sample: its most probable class."""

    sample: str
    name: str
    probability: float
    unsure: bool


def predict(model: Ready, path: Path, sure: float = SURE) -> Iterator[Prediction]:
    """For each picture, row or sample at ``path``, in their order."""
    for names, x in model.needs.read(path):
        for sample, row in zip(names, model.probabilities(x), strict=True):
            label = int(row.argmax())
            highest = float(row[label])
            yield Prediction(sample, model.needs.name(label), highest, highest < sure)


def table(predictions: Sequence[Prediction], sure: float, unseen: str = "") -> Table:
    """``unseen``: names of classes that the model's client had no training sample of."""
    rows = [
        [one_line(p.sample), one_line(p.name), f"{p.probability:.3f}", UNSURE if p.unsure else ""]
        for p in predictions
    ]
    unsure = sum(p.unsure for p in predictions)
    note = f"{unsure} of {len(rows)} unsure: the probability is below {sure:g} (--sure)."
    if unseen:
        note += f" This client had no training sample of: {one_line(unseen)}."
    return Table("", ["sample", "class", "probability", ""], rows, note, names=2)


def write_csv(predictions: Sequence[Prediction], path: Path) -> None:
    """All digits, and a line for each sample."""
    if path.suffix.lower() != ".csv":
        raise ConfigError(f"'{path}' must end in .csv", "--out")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", "class", "probability", UNSURE])
    for p in predictions:
        writer.writerow([p.sample, p.name, repr(p.probability), int(p.unsure)])
    write_atomically(path, text.getvalue().encode("utf-8", "backslashreplace"))
