"""Where samples come from: private ones with labels, public ones without."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from perfed.core.errors import ConfigError
from perfed.core.registry import Component, Registry
from perfed.core.schema import option
from perfed.core.streams import numpy_stream


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

    Images are channels first. Whole-number images (0 … 255) are scaled to −1 … 1.
    """

    path: str = option("", "the .npz file")
    public: int = option(
        0, "how many samples are held out as the public set, where the file has none", ge=0
    )

    def load(self, seed: int) -> Samples:
        arrays = self._read()
        x, y = _scaled(arrays["x"]), arrays["y"].astype(np.int64)
        if len(x) != len(y):
            raise ConfigError(f"{len(x)} samples but {len(y)} labels in {self.path}", "data")
        if len(y) and y.min() < 0:
            raise ConfigError(f"label {y.min()} in {self.path}: labels are 0, 1, 2, …", "data")
        client_ids = arrays.get("client")
        if "public" not in arrays:
            return hold_out_public(x, y, self.public, seed, client_ids)
        if self.public:
            raise ConfigError(f"{self.path} has a public set of its own", "data.public")
        public_x = _scaled(arrays["public"])
        return Samples(
            x,
            y,
            np.arange(len(x)),
            public_x,
            np.arange(len(public_x)),
            int(y.max()) + 1,
            client_ids,
        )

    def _read(self) -> dict[str, np.ndarray]:
        path = Path(self.path).expanduser()
        if not path.is_file():
            raise ConfigError(f"no such file: {self.path!r}", "data.path")
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
        except (ValueError, OSError, EOFError) as error:
            raise ConfigError(f"cannot read {self.path}: {error}", "data.path") from None
        for name in ("x", "y"):
            if name not in arrays:
                raise ConfigError(f"{self.path} has no array '{name}'", "data.path")
        return arrays


def _scaled(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) / 127.5 - 1 if x.dtype == np.uint8 else x.astype(np.float32)
