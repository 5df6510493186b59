"""Where samples come from: private ones with labels, public ones without."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from perfed.core.errors import ConfigError, DataError
from perfed.core.registry import Component, Registry
from perfed.core.schema import option
from perfed.core.streams import numpy_stream
from perfed.data.readers import read_arrays


@dataclass(frozen=True)
class Samples:
    """A loaded dataset. ``index`` and ``public_index`` say where its samples stood originally."""

    x: np.ndarray
    y: np.ndarray
    index: np.ndarray
    public_x: np.ndarray
    public_index: np.ndarray
    classes: int
    client_ids: np.ndarray | None = None


class Dataset(Component):
    registry: ClassVar[Registry[Dataset]]

    @abstractmethod
    def load(self, seed: int) -> Samples: ...


datasets: Registry[Dataset] = Registry("dataset")
Dataset.registry = datasets


def hold_out_public(
    x: np.ndarray, y: np.ndarray, public: int, seed: int, client_ids: np.ndarray | None = None
) -> Samples:
    """Take ``public`` samples, drawn per seed, out of the private data; their labels are lost."""
    if public >= len(x):
        raise ConfigError(
            f"{public} public samples of {len(x)}: must leave some private", "data.public"
        )
    order = numpy_stream(seed, "public-set").permutation(len(x))
    public_index, index = np.sort(order[:public]), np.sort(order[public:])
    return Samples(
        x=x[index],
        y=y[index],
        index=index,
        public_x=x[public_index],
        public_index=public_index,
        classes=int(y.max()) + 1,
        client_ids=None if client_ids is None else client_ids[index],
    )


@datasets.register("digits")
@dataclass(frozen=True)
class Digits(Dataset):
    """scikit-learn's 1,797 handwritten digits, 8×8, which come with it: no download."""

    public: int = option(400, "how many are held out as the unlabeled public set", ge=0)

    def load(self, seed: int) -> Samples:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x = (images / 8.0 - 1.0).reshape(-1, 1, 8, 8).astype(np.float32)
        return hold_out_public(x, labels.astype(np.int64), self.public, seed)


@datasets.register("npz")
@dataclass(frozen=True)
class Npz(Dataset):
    """Your own arrays: ``x``, ``y``, and if there are any ``public`` and ``client`` (an id each).

    Images are channels first; bytes (uint8, 0 … 255) are scaled to −1 … 1.
    """

    path: str = option("", "the .npz file")
    public: int = option(
        0, "how many samples are held out as the public set, where the file has none", ge=0
    )

    def load(self, seed: int) -> Samples:
        arrays = self._read()
        x, y, public, client_ids = (arrays.get(n) for n in ("x", "y", "public", "client"))
        if x is None or y is None:
            raise self._error(f"no array '{'y' if y is None else 'x'}'")
        self._check_samples("x", x)
        y = self._checked_labels(y, len(x))
        if client_ids is not None and client_ids.shape != y.shape:
            raise self._error(f"{len(y)} samples but {client_ids.size} client ids")
        if public is None:
            return hold_out_public(scaled(x), y, self.public, seed, client_ids)
        if self.public:
            raise ConfigError(f"{self.path} has a public set of its own", "data.public")
        self._check_samples("public", public)
        if public.shape[1:] != x.shape[1:]:
            raise self._error(f"public samples are {public.shape[1:]}, private ones {x.shape[1:]}")
        everything, public_index = np.arange(len(x)), np.arange(len(public))
        return Samples(
            scaled(x), y, everything, scaled(public), public_index, int(y.max()) + 1, client_ids
        )

    def _error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.path}: {message}", "data.path")

    def _check_samples(self, name: str, x: np.ndarray) -> None:
        if x.ndim < 2 or not len(x) or not np.issubdtype(x.dtype, np.number):
            raise self._error(f"'{name}' must be numbers, samples × features or images")
        if not np.isfinite(x).all():
            raise self._error(f"'{name}' has values that are not finite")

    def _checked_labels(self, y: np.ndarray, samples: int) -> np.ndarray:
        if y.shape != (samples,):
            raise self._error(f"{samples} samples but labels of shape {y.shape}")
        if not np.issubdtype(y.dtype, np.number) or (y != y.astype(np.int64)).any() or y.min() < 0:
            raise self._error("labels must be 0, 1, 2, …")
        return y.astype(np.int64)

    def _read(self) -> dict[str, np.ndarray]:
        try:
            return read_arrays(Path(self.path).expanduser())
        except DataError as error:
            raise ConfigError(str(error), "data.path") from None


def scaled(x: np.ndarray) -> np.ndarray:
    """As float32; bytes from −1 to 1. In place, since a set may take much of the memory."""
    result = x.astype(np.float32)
    if x.dtype == np.uint8:
        result /= 127.5
        result -= 1
    return result
