"""Where samples come from: private ones with labels, public ones without."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from perfed.core.errors import ConfigError
from perfed.core.inputs import Tokens
from perfed.core.pixels import scaled
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
    unscaled: np.ndarray | None = None
    """Which features are still to be standardised, once it is known which samples train."""
    origin: dict[str, Any] = field(default_factory=dict)
    """What a run directory keeps of a user's own data: its hash, and the names of the classes."""
    spare: Spare | None = None
    tokens: Tokens | None = None
    """That samples are tokens, which stay integers; None: they are numbers."""
    pixels: bool = False
    """That bytes are pixels, which networks get as numbers from −1 to 1; else they get bytes as
    they are."""

    def numbers(self, x: np.ndarray) -> np.ndarray:
        """Some of these samples, as networks get them: for whoever looks at them."""
        return scaled(x) if self.pixels and x.dtype == np.uint8 else x


@dataclass(frozen=True)
class Spare:
    """Samples that no client is given: which of all of them, as they are stored."""

    all: Samples
    where: np.ndarray


@dataclass(frozen=True)
class Unlabeled:
    """Samples for a public set, and where they stood originally."""

    x: np.ndarray
    index: np.ndarray
    origin: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    """Of images, before they were resized."""
    tokens: Tokens | None = None
    pixels: bool = False
    """That bytes are pixels."""


class ClientData(ABC):
    """Clients' samples that are made or read for one client at a time: they are never all in
    memory."""

    samples: Samples
    """The public set and the number of classes; ``x`` has no rows, and says their shape."""
    sizes: np.ndarray
    """How many samples each client has."""

    @abstractmethod
    def client(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples and labels of one client, the same whenever they are asked for."""

    def positions(self, number: int) -> np.ndarray:
        return np.arange(self.sizes[number])


class Dataset(Component):
    registry: ClassVar[Registry[Dataset]]

    @abstractmethod
    def load(self, seed: int) -> Samples: ...

    def client_data(self, seed: int, clients: int) -> ClientData | None:
        """Where the samples of each client are made or read by themselves; None: ``load`` has
        them all."""
        return None

    def unlabeled(self, seed: int) -> Unlabeled:
        """Its samples as another dataset's public set."""
        samples = self.load(seed)
        return Unlabeled(
            samples.x, samples.index, samples.origin, tokens=samples.tokens, pixels=samples.pixels
        )

    @classmethod
    def expand(cls, value: Any) -> Any:
        """``Experiment(data=a_torch_dataset)``."""
        return {"name": "torch", "path": value} if isinstance(value, TorchDataset) else value


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
    private = index if public else slice(None)  # without a copy
    return Samples(
        x=x[private],
        y=y[private],
        index=index,
        public_x=x[public_index],
        public_index=public_index,
        classes=int(y.max()) + 1,
        client_ids=None if client_ids is None else client_ids[private],
    )


def finished(samples: Samples, count: int, seed: int) -> Samples:
    """``count`` of the private samples, as a federation holds them."""
    total = len(samples.x)
    if count > total:
        raise ConfigError(f"{count} samples of the {total} there are", "data.samples")
    kept: Any = slice(None)
    spare = None
    if count:
        kept = drawn(count, total, seed, "private-set")
        spare = Spare(samples, np.setdiff1d(np.arange(total), kept))
    ids = samples.client_ids
    return dataclasses.replace(
        samples,
        x=_held(samples, samples.x[kept]),
        y=samples.y[kept].copy(),
        index=samples.index[kept],
        public_x=_held(samples, samples.public_x),
        client_ids=None if ids is None else ids[kept],
        spare=spare,
        pixels=samples.unscaled is None and samples.tokens is None,
    )


def with_spare(samples: Samples, where: np.ndarray) -> Samples:
    """These of the spare samples too, after the others."""
    assert samples.spare is not None
    stored = samples.spare.all
    return dataclasses.replace(
        samples,
        x=np.concatenate([samples.x, _held(stored, stored.x[where])]),
        y=np.concatenate([samples.y, stored.y[where]]),
        index=np.concatenate([samples.index, stored.index[where]]),
        client_ids=None,
    )


def taken(samples: Samples, where: np.ndarray) -> Samples:
    """These of the private samples, in this order; one may be there twice."""
    ids = samples.client_ids
    return dataclasses.replace(
        samples,
        x=samples.x[where],
        y=samples.y[where],
        index=samples.index[where],
        client_ids=None if ids is None else ids[where],
    )


def _held(samples: Samples, x: np.ndarray) -> np.ndarray:
    # What is still to be standardised keeps its digits until then.
    return x if samples.unscaled is not None else stored(x, samples.tokens)


def drawn(count: int, total: int, seed: int, purpose: str) -> np.ndarray:
    """Which of ``total`` are drawn, in their order."""
    return np.sort(numpy_stream(seed, purpose).permutation(total)[:count])


def stored(x: np.ndarray, tokens: Tokens | None) -> np.ndarray:
    """As a federation holds samples: tokens as integers, bytes as the pixels they are, all else as
    float32. Copied only where it must be; what is read from a mapped file is read now."""
    other = np.uint8 if x.dtype == np.uint8 else np.float32
    return x.astype(np.int64 if tokens else other, copy=not x.flags.writeable)


@datasets.register("digits")
@dataclass(frozen=True)
class Digits(Dataset):
    """scikit-learn's 1,797 handwritten digits, 8×8, which come with it: no download."""

    public: int = option(400, "how many samples are held out as the unlabeled public set", ge=0)

    def load(self, seed: int) -> Samples:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        x = (images / 8.0 - 1.0).reshape(-1, 1, 8, 8).astype(np.float32)
        return hold_out_public(x, labels.astype(np.int64), self.public, seed)
