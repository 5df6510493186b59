"""Datasets of very many clients, whose samples are made or read for one client at a time."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from perfed.core.errors import ConfigError
from perfed.core.paths import expanded
from perfed.core.schema import option
from perfed.core.streams import numpy_stream
from perfed.data.datasets import ClientData, Dataset, Samples, datasets, stored
from perfed.data.sources import content_hash


@datasets.register("synthetic")
@dataclass(frozen=True)
class Synthetic(Dataset):
    """After Li et al.'s Synthetic(α, β), with a linear model in common: every client labels its
    samples by that model and a deviation of its own, and they lie around a mean of its own.
    Nothing is stored: a client's samples follow from the seed and its number, so there may be
    millions of clients."""

    alpha: float = option(0.5, "variance of the clients' models around the common one", ge=0)
    beta: float = option(0.5, "variance of the clients' means around zero", ge=0)
    samples: int = option(20, "samples of each client", ge=3)
    features: int = option(60, "numbers of a sample", ge=1)
    classes: int = option(10, "classes", ge=2)
    public: int = option(0, "samples of the unlabeled public set", ge=0)

    def load(self, seed: int) -> Samples:
        raise ConfigError("the samples are made for each client: must be given", "partition")

    def client_data(self, seed: int, clients: int) -> ClientData:
        return _GeneratedData(self, seed, clients)


class _GeneratedData(ClientData):
    def __init__(self, options: Synthetic, seed: int, clients: int) -> None:
        self._options = options
        self._seed = seed
        self.sizes = np.full(clients, options.samples)
        shape = options.features, options.classes
        self._common = numpy_stream(seed, "synthetic-common").normal(size=shape)
        self._spread = np.arange(1, options.features + 1) ** -0.6  # variances fall as j^(−1.2)
        public = [self._samples(seed, "synthetic-public", n, 1) for n in range(options.public)]
        nothing = np.empty((0, options.features), dtype=np.float32)
        self.samples = Samples(
            x=nothing,
            y=np.empty(0, dtype=np.int64),
            index=np.empty(0, dtype=np.int64),
            public_x=np.concatenate([nothing, *(x for x, _ in public)]),
            public_index=np.arange(options.public),
            classes=options.classes,
        )

    def client(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        return self._samples(self._seed, "synthetic", number, self._options.samples)

    def _samples(
        self, seed: int, purpose: str, number: int, count: int
    ) -> tuple[np.ndarray, np.ndarray]:
        options, random = self._options, numpy_stream(seed, purpose, number)
        model = random.normal(self._common, options.alpha**0.5)
        mean = random.normal(0, options.beta**0.5, options.features)
        x = random.normal(mean, 1, (count, options.features)) * self._spread
        return x.astype(np.float32), (x @ model).argmax(1)


@datasets.register("mapped")
@dataclass(frozen=True)
class Mapped(Dataset):
    """A folder of arrays too large for memory, the samples of one client after those of another:
    x.npy, y.npy, sizes.npy (how many samples each client has) and, for methods that need one,
    public.npy. Only the samples of the clients at work are read."""

    path: str = option("", "the folder")

    def load(self, seed: int) -> Samples:
        raise ConfigError("the samples are read for each client: must be given", "partition")

    def client_data(self, seed: int, clients: int) -> ClientData:
        data = _MappedData(expanded(self.path, "data.path"))
        if len(data.sizes) != clients:
            raise ConfigError(f"the data has {len(data.sizes)} clients, not {clients}", "clients")
        return data


class _MappedData(ClientData):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._x, self._y = _array(folder, "x"), _array(folder, "y")
        self.sizes = np.asarray(_array(folder, "sizes"))
        _check(folder, self._x, self._y, self.sizes)
        self._ends = np.cumsum(self.sizes)
        public = _array(folder, "public") if (folder / "public.npy").is_file() else self._x[:0]
        if public.shape[1:] != self._x.shape[1:]:
            raise ConfigError(f"{folder}: public.npy and x.npy differ in shape", "data.path")
        self.samples = Samples(
            x=stored(self._x[:0], None),
            y=np.empty(0, dtype=np.int64),
            index=np.empty(0, dtype=np.int64),
            public_x=stored(np.asarray(public), None),
            public_index=np.arange(len(public)),
            classes=int(self._y.max()) + 1,
            pixels=True,
            # Of the samples themselves no more than a few: all of them may take hours to read.
            origin={
                "hash": content_hash(self.sizes, self._y, self._x[:: 1 + len(self._x) // 1000])
            },
        )
        _give_back(self._x)

    def __reduce__(self) -> tuple[type[_MappedData], tuple[Path]]:
        """Elsewhere it is read again: the arrays may be too large to send."""
        return _MappedData, (self._folder,)

    def client(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        own = slice(self._ends[number] - self.sizes[number], self._ends[number])
        x, y = np.array(self._x[own]), self._y[own].astype(np.int64)
        _give_back(self._x)
        return stored(x, None), y


def _give_back(mapped: np.ndarray) -> None:
    """Pages that were read, and those around them, else count as this process's memory: soon all
    of the file does."""
    if isinstance(mapped.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        mapped.base.madvise(mmap.MADV_DONTNEED)


def _array(folder: Path, name: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} cannot be read: {reason}", "data.path") from None
    return array


def _check(folder: Path, x: np.ndarray, y: np.ndarray, sizes: np.ndarray) -> None:
    for name, array in (("y", y), ("sizes", sizes)):
        if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array) or array.min() < 0:
            raise ConfigError(
                f"{folder / name}.npy must be a list of whole numbers from 0 on", "data.path"
            )
    if not len(x) == len(y) == sizes.sum():
        raise ConfigError(
            f"{folder} has {len(x)} samples, {len(y)} labels and clients with {sizes.sum()} "
            "samples: must be the same number",
            "data.path",
        )
