"""Datasets of the Hugging Face Hub, or of a folder that its library reads (perfed[huggingface])."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from perfed.core.errors import ConfigError, DataError, did_you_mean
from perfed.core.extras import needed
from perfed.core.schema import option
from perfed.data.datasets import datasets
from perfed.data.files import check_size
from perfed.data.readers import Look, as_array
from perfed.data.sources import (
    COLOURS_HELP,
    SIZE_HELP,
    Contents,
    OwnData,
    checked_samples,
    named_labels,
)
from perfed.data.tokens import VOCABULARY_HELP, tokens_in

SAVED = ("state.json", "dataset_dict.json")  # what 'save_to_disk' leaves behind
RAGGED = "sequences differ in length: fill them up to one length"
ARRAYS = ("Array2D", "Array3D", "Array4D", "Sequence", "List", "LargeList")


@datasets.register("huggingface")
@dataclass(frozen=True)
class HuggingFace(OwnData):
    """A dataset of the Hugging Face Hub by name (``ylecun/mnist``), or a local one by folder.

    Needs ``pip install 'perfed[huggingface]'``. What is fetched is kept where its library keeps it.
    Columns of numbers are taken as they are.
    """

    path: str = option("", "the name on the Hub, or a folder")
    subset: str = option("", "which configuration of it, where there are several")
    split: str = option("train", "which split; 'train+test' for both, 'train[:10%]' for a part")
    revision: str = option("", "a commit or tag on the Hub, so that the data stays the same")
    inputs: tuple[str, ...] = option(
        (), "the column of images or arrays, or the columns of numbers; empty: found by their type"
    )
    target: str = option("label", "the label column: what is predicted")
    client: str = option("", "the column with the client of each sample; needs partition: given")
    vocabulary: int = option(0, VOCABULARY_HELP, ge=0)
    size: tuple[int, ...] = option((), SIZE_HELP, ge=1)
    colours: Literal["rgb", "grey"] = option("rgb", COLOURS_HELP)

    def validate(self) -> None:
        check_size(self.size)

    def read(self, labeled: bool) -> Contents:
        loaded = self._loaded()
        if labeled:
            _check_column(loaded, self.target, "target")
        inputs = self._inputs(loaded.features)
        for name in inputs:
            _check_column(loaded, name, "inputs")
        x, sizes = self._samples(loaded, inputs)
        x = checked_samples(x, f"'{', '.join(inputs)}'")
        one = len(inputs) == 1  # several columns of numbers are a table
        tokens = tokens_in(x, self.vocabulary, f"'{inputs[0]}'") if one or self.vocabulary else None
        if not labeled:
            return Contents(x, sizes=sizes, tokens=tokens)
        y, names = _labels(loaded, self.target)
        ids = None
        if self.client:
            _check_column(loaded, self.client, "client")
            ids = np.array([str(value) for value in loaded[self.client]])
        return Contents(x, y, names, ids, sizes=sizes, tokens=tokens)

    def _loaded(self) -> Any:
        library = needed("datasets", "huggingface", "name")
        folder = os.path.expanduser(self.path)
        try:
            if any(os.path.isfile(os.path.join(folder, name)) for name in SAVED):
                return self._saved(library.load_from_disk(folder))
            return library.load_dataset(
                folder if os.path.isdir(folder) else self.path,
                self.subset or None,
                split=self.split,
                revision=self.revision or None,
            )
        except ConfigError:
            raise
        except Exception as error:  # its own, those of the network, those of every file format
            reason = str(error).strip().splitlines() or [""]
            raise DataError(
                f"'{self.path}' cannot be loaded: {type(error).__name__}: {reason[0]}"
            ) from None

    def _saved(self, saved: Any) -> Any:
        """What 'save_to_disk' has written: one split, or several by name."""
        if not isinstance(saved, dict):
            return saved
        library = needed("datasets", "huggingface", "name")
        names = self.split.split("+")
        for name in names:
            if name not in saved:
                raise ConfigError(f"no split '{name}'{did_you_mean(name, saved)}", "split")
        return library.concatenate_datasets([saved[name] for name in names])

    def _inputs(self, features: Any) -> tuple[str, ...]:
        if self.inputs:
            return self.inputs
        kinds = {name: type(feature).__name__ for name, feature in features.items()}
        images = [name for name, kind in kinds.items() if kind == "Image"]
        arrays = [name for name, kind in kinds.items() if kind in ARRAYS]
        for found in (images, arrays):
            if len(found) == 1:
                return (found[0],)
        numbers = [
            name
            for name, feature in features.items()
            if name not in (self.target, self.client)
            and str(getattr(feature, "dtype", "")).startswith(("int", "float", "uint"))
        ]
        if images or arrays or not numbers:
            raise ConfigError(
                f"name the column of images or numbers (there are: {', '.join(kinds)})", "inputs"
            )
        return tuple(numbers)

    def _samples(self, loaded: Any, inputs: Sequence[str]) -> tuple[np.ndarray, tuple[str, ...]]:
        if type(loaded.features[inputs[0]]).__name__ == "Image":
            if len(inputs) > 1:
                raise ConfigError("one column of images, or columns of numbers", "inputs")
            return self._images(loaded, inputs[0])
        table = loaded.select_columns(list(inputs)).with_format("numpy")
        try:
            columns = [np.asarray(table[name][:]) for name in inputs]
            x = columns[0] if len(inputs) == 1 else np.stack(columns, axis=1)
        except ValueError as error:
            raise DataError(f"'{', '.join(inputs)}' cannot be one array: {error}") from None
        if x.dtype.kind == "O":  # how its library gives sequences that differ in length
            raise DataError(f"'{', '.join(inputs)}': {RAGGED}")
        return (x[:, None] if x.ndim == 1 else x), ()

    def _images(self, loaded: Any, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
        look = Look(self.size, self.colours == "grey")
        pictures: list[np.ndarray] = []
        sizes: set[str] = set()
        for number, row in enumerate(loaded.select_columns([name])):
            picture = row[name]
            if picture is None:
                raise DataError(f"sample {number} has no '{name}'")
            pictures.append(as_array(picture, look))
            sizes.add(f"{picture.height}×{picture.width}")
            if pictures[-1].shape != pictures[0].shape:
                raise DataError(
                    f"sample {number} is {picture.height}×{picture.width}, not of one size with "
                    "the first; set 'size' to have them resized"
                )
        stacked = np.stack(pictures).transpose(0, 3, 1, 2)
        return np.ascontiguousarray(stacked), tuple(sorted(sizes))


def _check_column(loaded: Any, name: str, key: str) -> None:
    if name not in loaded.features:
        hint = did_you_mean(name, loaded.features)
        raise ConfigError(f"there is no column '{name}'{hint}", key)


def _labels(loaded: Any, name: str) -> tuple[np.ndarray, tuple[str, ...]]:
    feature, values = loaded.features[name], list(loaded[name])
    if any(value is None for value in values):
        raise DataError(f"sample {values.index(None)} has no '{name}'")
    if type(feature).__name__ == "ClassLabel":
        labels = np.array(values)
        if labels.min() < 0:  # how the Hub writes labels that it keeps to itself
            raise DataError(f"sample {int(labels.argmin())} has no '{name}'")
        if labels.max() >= len(feature.names):
            where = int(labels.argmax())
            raise DataError(
                f"label {labels[where]} of sample {where} has no name: '{name}' names "
                f"{len(feature.names)}, from 0 on"
            )
        return labels, tuple(feature.names)
    return named_labels(values, f"column '{name}'")
