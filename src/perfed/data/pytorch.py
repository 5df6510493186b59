"""Any ``torch.utils.data.Dataset``: read once, from its first sample to its last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as TorchDataset

from perfed.core.errors import ConfigError, DataError
from perfed.core.objects import give, import_object
from perfed.core.schema import option
from perfed.core.streams import torch_stream
from perfed.data.datasets import datasets
from perfed.data.picture_layout import LAYOUT_HELP, Layout, channels_first
from perfed.data.sources import (
    MOST_OUTPUTS,
    NUMBERS,
    Contents,
    OwnData,
    checked_labels,
    checked_samples,
    content_hash,
    too_high,
)
from perfed.data.tokens import VOCABULARY_HELP, tokens_in


@datasets.register("torch")
@dataclass(frozen=True)
class TorchData(OwnData):
    """Your own ``torch.utils.data.Dataset``, whose items are x and label.

    As a public set, x alone will do. It is read once: random transforms are not drawn again for
    every batch. In Python, give the object itself: ``Experiment(data=mine)``, or
    ``{"name": "torch", "path": mine, "public": 200}``.
    """

    path: str | Any = option(
        "", "file.py:Name or package.module:Name of the dataset, or of a function that returns it"
    )
    layout: Layout = option("auto", LAYOUT_HELP)
    vocabulary: int = option(0, VOCABULARY_HELP, ge=0)

    def validate(self) -> None:
        if isinstance(self.path, str):
            return
        if not isinstance(self.path, TorchDataset):
            raise ConfigError(
                f"a {type(self.path).__name__} is no torch.utils.data.Dataset", "path"
            )
        try:
            contents = read_items(self.path)
        except DataError as error:
            raise ConfigError(str(error), "path") from None
        arrays = [contents.x] if contents.y is None else [contents.x, contents.y]
        digest = content_hash(*arrays).encode()
        object.__setattr__(self, "path", give(contents, type(self.path).__name__, digest))

    def read(self, labeled: bool) -> Contents:
        found = import_object(self.path)
        contents = found if isinstance(found, Contents) else read_items(self._made(found))
        x, what = contents.x, "the dataset"
        tokens = tokens_in(x, self.vocabulary, what)
        if not tokens:
            x = channels_first(x, self.layout, what)
        return Contents(x, contents.y if labeled else None, tokens=tokens)

    def _made(self, found: Any) -> TorchDataset[Any]:
        if callable(found) and not isinstance(found, TorchDataset):
            try:
                found = found()
            except Exception as error:  # whatever a user's own code raises
                reason = f"{type(error).__name__}: {error}"
                raise DataError(f"{self.path}() failed: {reason}") from None
        if not isinstance(found, TorchDataset):
            raise DataError(
                f"{self.path} is a {type(found).__name__}, not a torch.utils.data.Dataset"
            )
        return found


def read_items(dataset: TorchDataset[Any]) -> Contents:
    samples: list[np.ndarray] = []
    labels: list[Any] = []
    with torch_stream(0, "torch-dataset"):  # random transforms give the same when read again
        for number, item in enumerate(_items(dataset)):
            x, *rest = item if isinstance(item, tuple | list) else (item,)
            samples.append(_array(x, number, samples))
            if rest:
                labels.append(_label(rest[0], number))
    if not samples:
        raise DataError("the dataset has no samples")
    if labels and len(labels) < len(samples):
        raise DataError(f"{len(samples)} samples but {len(labels)} labels")
    x = checked_samples(np.stack(samples), "x of the dataset")
    return Contents(x, checked_labels(labels, len(x)) if labels else None)


def _items(dataset: Any) -> Iterator[Any]:
    if not hasattr(dataset, "__len__"):  # one that is only iterated over
        yield from dataset
        return
    for number in range(len(dataset)):
        try:
            yield dataset[number]
        except Exception as error:  # whatever a user's own code raises
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"item {number} of the dataset: {reason}") from None


def _array(x: Any, number: int, before: list[np.ndarray]) -> np.ndarray:
    if not isinstance(x, torch.Tensor | np.ndarray):
        raise DataError(
            f"item {number} of the dataset: x is a {type(x).__name__}, must be a tensor or an "
            "array (for pictures: torchvision.transforms.ToTensor())"
        )
    array = x.detach().cpu().numpy() if isinstance(x, torch.Tensor) else x
    if array.ndim == 0:
        raise DataError(f"item {number} of the dataset: x is one number alone")
    if before and array.shape != before[0].shape:
        raise DataError(
            f"item {number} of the dataset: x is of shape {array.shape}, the first was "
            f"{before[0].shape}: all must be alike; fill up sequences to one length"
        )
    return array


def _label(y: Any, number: int) -> int:
    value = np.asarray(y)
    if value.size != 1 or value.dtype.kind not in NUMBERS or value.item() % 1:
        raise DataError(f"item {number} of the dataset: label {y!r} must be 0, 1, 2, …")
    if abs(value.item()) >= MOST_OUTPUTS:  # it may be more than an array of labels can hold
        raise DataError(too_high(y, f"item {number} of the dataset"))
    return int(value.item())
