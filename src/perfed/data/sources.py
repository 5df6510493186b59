"""A user's own data: what all sources of it have in common.

A source says what it holds (:class:`Contents`); what is drawn, held out as the public set, scaled
and recorded is the same for all. So each of them can serve as another's public set too.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from perfed.core.errors import ConfigError, DataError, shape_text
from perfed.core.inputs import Tokens
from perfed.core.notices import say_once
from perfed.core.pixels import scaled
from perfed.core.schema import option
from perfed.data.datasets import (
    Dataset,
    Samples,
    Unlabeled,
    drawn,
    finished,
    hold_out_public,
    stored,
)
from perfed.data.likeness import check_alike, some
from perfed.data.tokens import all_tokens, common_tokens

BY_CLIENT_HELP = (
    "'path' holds a folder of pictures, or a file, for each client, named like it; "
    "with partition: given"
)
SIZE_HELP = "height and width to resize all images to; empty: no resizing, all must have one size"
MOST_CLASSES = 1000  # with names
FEW_ROWS = 20  # of fewer, each may be of another class
MOST_OUTPUTS = 1 << 15
"""Of a network, by labels that are numbers: the largest set in use, ImageNet-21k, has 21,841."""
MOST_MEASURED = 100
"""Different labels that are no whole numbers, or not written so: ratings from 0.5 to 5 are 10."""
NO_MEASUREMENT = "each a class of its own: they look like measurements, and a label is a class"
NUMBERS = "iuf"  # numpy's kinds: whole numbers and fractions
LARGEST = float(np.finfo(np.float32).max)
TOO_LARGE = f"is too large for float32, which ends at {LARGEST:.1e}"
BYTES = "0 … 255"  # what the cells of a table are that holds pixels
COLOURS_HELP = "three channels, or one"


@dataclass(frozen=True)
class Contents:
    """What a source holds, in its order. Bytes are pixels, and become numbers from −1 to 1, unless
    they are tokens."""

    x: np.ndarray
    y: np.ndarray | None = None
    names: tuple[str, ...] = ()
    """Of the classes; without names, they are as many as labels say."""
    client_ids: np.ndarray | None = None
    public: np.ndarray | None = None
    """A public set that is part of the source."""
    columns: tuple[str, ...] = ()
    """Names of the features of a table."""
    unscaled: np.ndarray | None = None
    """Which of them are to be standardised."""
    sizes: tuple[str, ...] = ()
    """Of images, before they were resized."""
    tokens: Tokens | None = None
    """That samples, public ones too, are tokens."""


@dataclass(frozen=True)
class OwnData(Dataset):
    """Base of all sources."""

    path: str = option("", "where it is")
    public: int | Dataset = option(
        0,
        "the unlabeled public set: how many samples are held out for it, or another dataset "
        "(name and options), whose labels are ignored",
        ge=0,
    )
    samples: int = option(0, "use this many samples, for a quick run; 0: all", ge=0)

    @abstractmethod
    def read(self, labeled: bool) -> Contents:
        """All there is; without labels, where they are not wanted."""

    def load(self, seed: int) -> Samples:
        contents = self._contents("data", labeled=True)
        assert contents.y is not None
        origin = _origin(contents)
        if contents.public is None and not isinstance(self.public, Dataset):
            held = hold_out_public(contents.x, contents.y, self.public, seed, contents.client_ids)
            public, tokens = None, contents.tokens
        else:
            public = self._public(contents, seed)
            tokens = common_tokens(contents.tokens, public.tokens)
            origin["public"] = public.origin
            held = Samples(
                contents.x,
                contents.y,
                np.arange(len(contents.x)),
                public.x,
                public.index,
                int(contents.y.max()) + 1,
                contents.client_ids,
            )
        held = dataclasses.replace(
            held,
            classes=len(contents.names) or held.classes,
            unscaled=contents.unscaled,
            origin=origin,
            tokens=tokens,
        )
        samples = finished(held, self.samples, seed)
        if public is not None:
            own, shared = (samples.numbers(some(x)) for x in (samples.x, samples.public_x))
            check_alike(own, shared, contents.sizes, public.sizes)
        return samples

    def unlabeled(self, seed: int) -> Unlabeled:
        contents = self._contents("data.public", labeled=False)
        index = self._drawn_public(len(contents.x), seed)
        x = stored(contents.x[index], contents.tokens)
        are_pixels = contents.tokens is None
        return Unlabeled(x, index, _origin(contents), contents.sizes, contents.tokens, are_pixels)

    def _drawn_public(self, total: int, seed: int) -> np.ndarray:
        """Which of its samples are another dataset's public set."""
        if self.samples > total:
            raise ConfigError(
                f"{self.samples} samples of the {total} there are", "data.public.samples"
            )
        return drawn(self.samples or total, total, seed, "public-set")

    def _public(self, contents: Contents, seed: int) -> Unlabeled:
        if contents.public is None:
            assert isinstance(self.public, Dataset)
            found = self.public.unlabeled(seed)
            if contents.unscaled is None or not found.pixels:
                return found
            return dataclasses.replace(found, x=scaled(found.x))  # to be standardised as numbers
        if self.public:
            raise ConfigError(
                f"{self.path} has a public set of its own: leave out either", "data.public"
            )
        where = np.arange(len(contents.public))
        origin = {"hash": content_hash(contents.public)}
        return Unlabeled(contents.public, where, origin, tokens=contents.tokens)

    def _contents(self, where: str, labeled: bool) -> Contents:
        """What is there; errors say which key it is about."""
        if not self.path:
            raise ConfigError("missing: where the data is", f"{where}.path")
        try:
            contents = self.read(labeled)
        except DataError as error:
            raise ConfigError(str(error), f"{where}.path") from None
        except ConfigError as error:
            raise error.inside(where) from None
        if labeled and contents.y is None:
            raise ConfigError(
                f"{self.path} has no labels: it can serve as a public set only", f"{where}.path"
            )
        first = 0 if contents.y is None or contents.names else contents.y.min()
        if first:
            say_once(
                f"labels begin at {first}, not at 0: networks have outputs for the labels below, "
                f"which never occur; if that is not meant, subtract {first}"
            )
        return contents


@dataclass(frozen=True)
class Places(OwnData):
    """Base of sources that are files: all in one place, or in a place for each client."""

    endings: ClassVar[tuple[str, ...]] = ()
    """Of file names that ``perfed init`` takes for this kind of data; the first is that of a
    client's file. None: a client's data is a folder."""

    by_client: bool = option(False, BY_CLIENT_HELP)

    def belongs(self, entry: Path) -> bool:
        """Whether an entry of the folder is a client's data, by its name."""
        if not self.endings:
            return entry.is_dir()
        return entry.suffix.lower() == self.endings[0]

    def places(self) -> dict[str, Path]:
        """Where each client's data is; where all of it is, under no name."""
        path = Path(self.path).expanduser()
        if not self.by_client:
            return {"": path}
        if not path.is_dir():
            raise DataError(f"no such folder: {str(path)!r}")
        visible = (entry for entry in sorted(path.iterdir()) if not entry.name.startswith("."))
        entries = [entry for entry in visible if self.belongs(entry)]
        if not entries:
            raise DataError(f"{path} has nothing that could be a client's")
        return {entry.name if entry.is_dir() else entry.stem: entry for entry in entries}


@dataclass(frozen=True)
class Files(Places):
    """Base of sources whose places are read one by one."""

    @abstractmethod
    def read_one(self, path: Path, labeled: bool) -> Contents: ...

    def read(self, labeled: bool) -> Contents:
        places = self.places()
        contents = {name: self.read_one(place, labeled) for name, place in places.items()}
        return joined(contents) if self.by_client else contents[""]


def joined(by_client: dict[str, Contents]) -> Contents:
    """The contents of all clients, as one."""
    (first_name, first), *_ = by_client.items()
    for name, part in by_client.items():
        if part.x.shape[1:] != first.x.shape[1:]:
            raise DataError(
                f"the samples of '{name}' are {shape_text(part.x.shape[1:])}, "
                f"those of '{first_name}' {shape_text(first.x.shape[1:])}: they must be alike"
            )
        if (part.y is None) != (first.y is None) or part.public is not None:
            fault = "no labels" if part.y is None else "a public set, or labels others have not"
            raise DataError(f"'{name}' has {fault}")
    names = tuple(sorted({name for part in by_client.values() for name in part.names}))
    labels = None
    if first.y is not None:
        labels = np.concatenate([_renumbered(part, names) for part in by_client.values()])
    ids = np.repeat(list(by_client), [len(part.x) for part in by_client.values()])
    return dataclasses.replace(
        first,
        x=np.concatenate([part.x for part in by_client.values()]),
        y=labels,
        names=names,
        client_ids=ids,
        sizes=tuple(sorted({size for part in by_client.values() for size in part.sizes})),
        tokens=all_tokens([part.tokens for part in by_client.values()]),
    )


def _renumbered(part: Contents, names: Sequence[str]) -> np.ndarray:
    """Labels as positions in the names of all clients' classes."""
    assert part.y is not None
    if not names:
        return part.y
    new = np.array([names.index(name) for name in part.names])
    return np.asarray(new[part.y])


def checked_samples(values: Any, what: str) -> np.ndarray:
    x: np.ndarray = np.asarray(values)
    if x.dtype.kind == "c":
        raise DataError(f"{what} is complex ({x.dtype}), must be real numbers: give both parts")
    if x.ndim < 2 or not x.size or x.dtype.kind not in NUMBERS:
        raise DataError(
            f"{what} must be numbers, samples × features or images, and some of each; "
            f"it is {shape_text(x.shape) or 'one value'} of {x.dtype}"
        )
    if not np.isfinite(x).all():
        bad = np.argwhere(~np.isfinite(x))[0]
        raise DataError(f"{what} is not finite: {x[tuple(bad)]} at {bad.tolist()}")
    if x.dtype.kind == "f" and max(x.max(), -x.min()) > LARGEST:
        bad = np.argwhere(np.abs(x) > LARGEST)[0]
        raise DataError(f"{what}: {x[tuple(bad)]} at {bad.tolist()} {TOO_LARGE}: scale it down")
    return x


def checked_labels(values: Any, samples: int) -> np.ndarray:
    y: np.ndarray = np.asarray(values)
    if y.shape != (samples,):
        raise DataError(f"{samples} samples but labels of shape {y.shape}")
    if y.dtype.kind not in NUMBERS:
        raise DataError(f"labels must be 0, 1, 2, …, not {y[0]!r}")
    wrong = np.flatnonzero(~(y >= 0) | ((y != np.floor(y)) if y.dtype.kind == "f" else False))
    if len(wrong):
        raise DataError(f"labels must be 0, 1, 2, …, not {y[wrong[0]]} as of sample {wrong[0]}")
    if y.max() >= MOST_OUTPUTS:  # before anything is made of this length
        raise DataError(too_high(y.max(), f"sample {y.argmax()}"))
    _speak_of_labels(y)
    return y.astype(np.int64)


def too_high(label: Any, which: str) -> str:
    return (
        f"label {label} of {which} is too high: networks have an output for every label up to the "
        f"highest, at most {MOST_OUTPUTS:,}; number the classes 0, 1, 2, …"
    )


def _speak_of_labels(y: np.ndarray) -> None:
    kinds, highest = len(np.unique(y)), int(y.max())
    if 2 * kinds < highest + 1:  # a stray label makes every network large
        say_once(
            f"labels go up to {highest}, so networks have {highest + 1} outputs, "
            f"but only {kinds} labels occur: is one of them wrong?"
        )
    if y.dtype.kind == "f" and kinds > MOST_MEASURED:
        say_once(f"labels are {kinds} different {y.dtype} numbers, {NO_MEASUREMENT}")


def named_labels(values: Sequence[Any], what: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels 0, 1, 2, … for the different values, in their order, and their names."""
    kinds = sorted(set(values), key=_order)
    if len(kinds) > MOST_CLASSES:
        raise DataError(
            f"{what} has {len(kinds):,} different values, such as {kinds[0]!r} and {kinds[1]!r}: "
            "a label is a class"
        )
    _speak_of_measured(kinds, what)
    if len(kinds) == len(values) >= FEW_ROWS:
        raise DataError(
            f"{what} has another value in every row, such as {kinds[0]!r} and {kinds[1]!r}: it "
            "names rows, and a label is a class; name the column of classes (target: …)"
        )
    label_of = {kind: label for label, kind in enumerate(kinds)}
    return np.array([label_of[value] for value in values]), tuple(map(str, kinds))


def _speak_of_measured(kinds: Sequence[Any], what: str) -> None:
    """Fractions that are many are refused; whole numbers written like them (3.0) may be meant."""
    written = [kind for kind in kinds if _order(kind)[0] == 0 and not _is_whole(str(kind))]
    if len(written) <= MOST_MEASURED:
        return
    text = f"{what} has {len(written):,} different values such as {written[0]} and {written[1]}"
    if any(float(kind) % 1 for kind in written):
        raise DataError(f"{text}, {NO_MEASUREMENT}")
    say_once(f"{text}, {NO_MEASUREMENT}")


def _is_whole(text: str) -> bool:
    return text.strip().lstrip("+-").isdecimal()


def _order(value: Any) -> tuple[Any, ...]:
    """Numbers as numbers (9 before 10), before words."""
    try:
        return 0, float(value), str(value)
    except ValueError:
        return 1, 0.0, str(value)


def content_hash(*arrays: np.ndarray) -> str:
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()


def _origin(contents: Contents) -> dict[str, Any]:
    """What a run directory keeps, so that a number is known by the data it is of."""
    arrays = (contents.x, contents.y, contents.client_ids)
    facts: dict[str, Any] = {
        "samples": len(contents.x),
        "shape": list(contents.x.shape[1:]),
        "hash": content_hash(*(array for array in arrays if array is not None)),
    }
    if contents.names:
        facts["classes"] = list(contents.names)
    if contents.columns:
        facts["columns"] = list(contents.columns)
        if contents.x.dtype == np.uint8:
            facts["values"] = BYTES
    return facts
