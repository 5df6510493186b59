"""Metrics: what is measured of each client's models, and how that becomes numbers to report.

A metric is a function from the logits and labels of one client's samples to one number. It is
registered by decorator, in one place; evaluation, summaries, frames, exports, trackers and the
checks of a federation take it from here::

    @metric("top2_accuracy", lowest=0, highest=1, better="higher", shown="percent")
    def top2_accuracy(logits, labels):
        \"\"\"Share of samples whose label is among the two most probable classes.\"\"\"
        return (logits.topk(2).indices == labels[:, None]).any(1).double().mean()

An experiment names a metric of your own by import path: ``metrics: [my_file.py:top2_accuracy]``.
The function returns a 0-dimensional tensor and must not move it to the CPU (no ``.item()``, no
``if`` on a value): the numbers of all clients leave the device together. The result must be a
number within the range, also where a client has samples of one class only. Most of perfed's own
take the samples of all clients at once (``together=True``, see :class:`Samples`): it is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from perfed.core.errors import ConfigError
from perfed.core.notices import say_once
from perfed.core.objects import import_object, import_path, tell_whereabouts, whereabouts

MODEL_KINDS = ("personal", "global")
EVALUATED_ON = ("validation", "test")
"""The parts of a client's data that its models are evaluated on."""
SIZE_GROUPS = ((1, 9), (10, 99), (100, 999), (1000, None))
CALIBRATION_BINS = 15
ROUNDING = 1e-6  # by which a number may leave its range

Columns = Mapping[str, np.ndarray]  # "test_accuracy" → one number per client


FIXED_POINT = 2.0**40
"""What is added as whole numbers is the same in any order, in which a GPU adds."""


@dataclass(frozen=True)
class Samples:
    """Logits and labels in groups, one after another: those of one client and part are a group."""

    logits: Tensor
    labels: Tensor
    sizes: Sequence[int]

    def groups(self) -> Iterator[tuple[Tensor, Tensor]]:
        sizes = list(self.sizes)
        return zip(torch.split(self.logits, sizes), torch.split(self.labels, sizes), strict=True)

    @cached_property
    def amounts(self) -> Tensor:
        """How many samples each group has."""
        return torch.tensor(self.sizes, dtype=torch.double, device=self.labels.device)

    @cached_property
    def right(self) -> Tensor:
        """1 where the most probable class is the label, else 0."""
        return (self.logits.argmax(1) == self.labels).long()

    @cached_property
    def _owner(self) -> Tensor:
        numbers = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return torch.as_tensor(numbers, device=self.labels.device)

    def sums(self, values: Tensor, key: Tensor | None = None, keys: int = 1) -> Tensor:
        """Whole numbers summed by group and by ``key``, 0 … ``keys`` − 1: groups × keys."""
        places = self._owner if key is None else self._owner * keys + key
        empty = torch.zeros(len(self.sizes) * keys, dtype=torch.long, device=values.device)
        return empty.index_add_(0, places, values).view(-1, keys)


Measure = Callable[..., Tensor]  # (logits, labels) → one number, or Samples → one for each group


@dataclass(frozen=True)
class Metric:
    """A function of one client's logits and labels, and what is known of its value."""

    name: str
    measure: Measure
    lowest: float
    highest: float
    better: Literal["higher", "lower"]
    shown: Literal["percent", "number"]
    together: bool
    """It is a function of :class:`Samples`: all clients at once, which is faster."""

    def values(self, samples: Samples) -> Tensor:
        """One number for each group."""
        if self.together:
            return self.measure(samples)
        return torch.stack([self.measure(*group) for group in samples.groups()])

    @property
    def about(self) -> str:
        """The first paragraph of the function's docstring."""
        return " ".join((self.measure.__doc__ or "").split("\n\n")[0].split())

    def possible(self, value: float) -> bool:
        """Whether it is in the range; False for what is not a number."""
        return self.lowest - ROUNDING <= value <= self.highest + ROUNDING

    def text(self, value: float) -> str:
        """As people read it."""
        return f"{100 * value:.1f} %" if self.shown == "percent" else f"{value:.3f}"


metrics: dict[str, Metric] = {}
"""All there are, by name."""


def metric(
    name: str,
    *,
    lowest: float,
    highest: float,
    better: Literal["higher", "lower"],
    shown: Literal["percent", "number"],
    together: bool = False,
) -> Callable[[Measure], Measure]:
    """Register a function as a metric; see the module's docstring."""

    def add(measure: Measure) -> Measure:
        known = metrics.get(name)
        if known and known.measure.__qualname__ != measure.__qualname__:  # not a cell run again
            raise ValueError(f"metric '{name}' is registered already")
        metrics[name] = Metric(name, measure, lowest, highest, better, shown, together)
        return measure

    return add


@metric("accuracy", lowest=0, highest=1, better="higher", shown="percent", together=True)
def accuracy(samples: Samples) -> Tensor:
    """Share of samples whose most probable class is their label."""
    return samples.sums(samples.right)[:, 0] / samples.amounts


# Below the largest float32, the mean over many clients is a number too.
@metric("loss", lowest=0, highest=torch.finfo(torch.float32).max, better="lower", shown="number")
def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return cross_entropy(logits, labels)


@metric("balanced_accuracy", lowest=0, highest=1, better="higher", shown="percent", together=True)
def balanced_accuracy(samples: Samples) -> Tensor:
    """Mean recall over the classes that occur: each class counts the same, however rare.

    Recall is the share of a class's samples that are recognised. With samples of one class only
    it is the accuracy.
    """
    classes = samples.logits.shape[1]
    there = samples.sums(torch.ones_like(samples.labels), samples.labels, classes)
    recalled = samples.sums(samples.right, samples.labels, classes)
    return (recalled.double() / there.clamp(min=1)).sum(1) / (there > 0).sum(1)


@metric("calibration_error", lowest=0, highest=1, better="lower", shown="percent", together=True)
def calibration_error(samples: Samples) -> Tensor:
    """Expected calibration error: how far confidence is from accuracy.

    A prediction's confidence is the probability of its most probable class. Samples go into 15
    bins of confidence of equal width, each with its upper end: (0, 1/15], (1/15, 2/15], … In each
    bin, mean confidence and accuracy differ by some gap; the result is the mean of the absolute
    gaps, weighted by each bin's share of the samples (Guo et al. 2017).
    """
    confidence = samples.logits.double().softmax(1).amax(1)
    # Within bounds also where a model has diverged; the loss is then not finite.
    bins = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1
    gaps = ((samples.right - confidence) * FIXED_POINT).long()
    # A bin's share times its mean gap is the sum of its gaps over the number of samples.
    total = samples.sums(gaps, bins, CALIBRATION_BINS).abs().sum(1)
    return total / (FIXED_POINT * samples.amounts)


def column_name(part: str, name: str) -> str:
    """Of a metric on a part of the data, in run directories and frames: ``test_accuracy``."""
    return f"{part}_{name}"


def column_metrics() -> dict[str, Metric]:
    """The metric of each column that evaluation gives."""
    return {column_name(part, name): metrics[name] for part in EVALUATED_ON for name in metrics}


def evaluate(samples: Samples) -> dict[str, Tensor]:
    """Every metric, by name: a number for each group of samples, still on its device."""
    return {name: one.values(samples).double() for name, one in metrics.items()}


def check_range(columns: Columns) -> None:
    """Raises ConfigError where a metric gave what it says it cannot give."""
    for name, one in column_metrics().items():
        for value in columns.get(name, ()):
            if not one.possible(value):
                raise ConfigError(
                    f"gave {value} for a client: must be from {one.lowest:g} to {one.highest:g}",
                    f"metric {one.name}",
                )


def known_metric(path: str) -> Metric:
    """A metric of a user's own, by import path: ``file.py:name``."""
    found = import_object(path)
    for one in metrics.values():
        if one.measure is found:
            return one
    raise ConfigError(f"'{path}' is not a metric: write @metric(…) above it")


def load_metrics(paths: Iterable[str]) -> None:
    """Know the metrics that an experiment names."""
    for number, path in enumerate(paths):
        try:
            known_metric(path)
        except ConfigError as error:
            raise ConfigError(error.message, f"metrics[{number}]") from None


def own_metrics() -> list[tuple[str, tuple[str, str]]]:
    """Where another process finds those that are not perfed's own; see :func:`learn`."""
    places = []
    for one in metrics.values():
        if one.measure.__module__ == __name__:
            continue
        path = import_path(one.measure)
        if path:
            places.append((path, whereabouts(path)))
        else:
            say_once(f"metric '{one.name}' is not in a file: Ray's workers do not know it")
    return places


def learn(places: list[tuple[str, tuple[str, str]]]) -> None:
    """Know the metrics of another process, from its :func:`own_metrics`."""
    for path, file in places:
        tell_whereabouts(*file)
        known_metric(path)


def size_group_name(low: int, high: int | None) -> str:
    return f"{low}-{high}" if high is not None else f"{low}+"


def summarize(
    columns: Columns, train_sizes: np.ndarray, weights: np.ndarray, selected: np.ndarray
) -> dict[str, Any]:
    """The averages of one model kind in one round.

    Each column under its own name is the mean over all clients. Test accuracy has more:
    ``selected`` is the mean over clients that trained at least once, ``weighted`` by the clients'
    own test samples (so it is the accuracy over all test data) or, where they are evaluated on
    others, by the samples they hold, ``worst_decile`` over the tenth of the clients with the lowest
    accuracy, ``by_train_size`` by group of training-set size.
    """
    accuracy = columns["test_accuracy"]
    return {name: _mean(columns[name]) for name in column_metrics() if name in columns} | {
        "test_accuracy_selected": _mean(accuracy[selected]),
        "test_accuracy_weighted": float(np.average(accuracy, weights=weights)),
        "test_accuracy_worst_decile": _mean(np.sort(accuracy)[: max(1, len(accuracy) // 10)]),
        "test_accuracy_by_train_size": {
            size_group_name(low, high): _mean(accuracy[inside])
            for low, high in SIZE_GROUPS
            if (inside := (train_sizes >= low) & (train_sizes <= (high or np.inf))).any()
        },
    }


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
