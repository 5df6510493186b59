"""What samples a model takes, and how new files become such samples.

A model is used long after it was trained, by people who have files and not the configuration. So it
carries :class:`Needs`: shape, channels, scaling, columns, names of classes. New samples go the same
way as those of training did, by the same readers; what does not fit is refused in one line, for a
model gives an answer to anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perfed.core.errors import ConfigError, DataError, shape_text
from perfed.core.inputs import Inputs
from perfed.core.pixels import scaled
from perfed.core.schema import Options, option
from perfed.data.arrays import load_arrays
from perfed.data.federation import Federation
from perfed.data.opening import open_file
from perfed.data.readers import (
    IMAGE_SUFFIXES,
    Look,
    channels_first,
    decoded_picture,
    pictures_below,
    read_pictures,
)
from perfed.data.sources import BYTES, MOST_OUTPUTS, checked_samples
from perfed.data.tables import Sheet, numbers, read_sheet
from perfed.data.tokens import check_tokens

AT_ONCE = 256  # pictures that are in memory together
LOOKED_AT = 1000  # samples by which the range of pixels is told
RANGES = ((-1.0, 1.0), (0.0, 1.0), (0.0, 255.0))
"""What black and white may be. perfed makes the first of bytes; people bring the others."""
DARKEST_WHITE = 200.0  # of 0 … 255: less is another unit
BEYOND = 0.5  # of the range: how far values of pixels may lie outside of it
SEPARATORS = (",", ";", "\t")


@dataclass(frozen=True)
class Needs(Options):
    """What a sample must be for a model, and what its classes are called."""

    shape: tuple[int, ...] = option((), "of one sample, as the network takes it", ge=1)
    classes: int = option(2, "how many there are", ge=2, le=MOST_OUTPUTS)
    names: tuple[str, ...] = option((), "of the classes; empty: 0, 1, 2, …")
    vocabulary: int = option(0, "samples are tokens, 0 … vocabulary-1; 0: numbers", ge=0)
    columns: tuple[str, ...] = option((), "of a table: numbers, or 'column=word' for a word")
    mean: tuple[float, ...] = option((), "of each number in training, which is taken off")
    deviation: tuple[float, ...] = option((), "of each number, which it is divided by", gt=0)
    pixels: tuple[float, ...] = option((), "what black and white are; empty: it is not known")
    pixel_cells: bool = option(False, "cells of a table are pixels, 0 … 255")

    def validate(self) -> None:
        if not self.shape:
            raise ConfigError("missing: what one sample is", "shape")
        if self.names and len(self.names) != self.classes:
            raise ConfigError(f"{len(self.names)} names of {self.classes} classes", "names")
        for name, values in (("mean", self.mean), ("deviation", self.deviation)):
            if values and len(values) != math.prod(self.shape):
                count = math.prod(self.shape)
                raise ConfigError(f"{len(values)} numbers, a sample has {count}", name)
        if self.pixels and self.pixels not in RANGES:
            raise ConfigError(f"{list(self.pixels)} is none of {[*map(list, RANGES)]}", "pixels")

    @property
    def inputs(self) -> Inputs:
        return Inputs.with_vocabulary(self.shape, self.vocabulary)

    @property
    def takes_pictures(self) -> bool:
        picture = len(self.shape) == 3 and self.shape[0] in (1, 3)
        return picture and not self.vocabulary and bool(self.pixels)

    def name(self, label: int) -> str:
        return self.names[label] if self.names else str(label)

    def described(self) -> str:
        """What to give it, for a person."""
        if self.takes_pictures:
            channels, height, width = self.shape
            colours = "grey" if channels == 1 else "colour"
            return f"pictures, {height}×{width} in {colours} (others are resized)"
        if self.columns:
            return f"a table with the columns {_few(self._column_names())}"
        if self.vocabulary:
            return f"{shape_text(self.shape)} tokens, 0 … {self.vocabulary - 1}"
        return f"arrays of {shape_text(self.shape)} numbers"

    def steps(self) -> list[str]:
        """How a sample becomes what the network takes, for a program in another language."""
        if self.vocabulary:
            return [f"whole numbers 0 … {self.vocabulary - 1}, {shape_text(self.shape)}, int64"]
        lines = []
        if self.takes_pictures:
            channels, height, width = self.shape
            low, high = self.pixels
            lines += [
                f"convert the picture to {'grey' if channels == 1 else 'RGB'}",
                f"resize it to {height}×{width}, bilinear (Pillow's Image.resize)",
                f"bytes 0 … 255 become {low:g} … {high:g}, linearly",
                "channels come first",
            ]
        if self.columns:
            lines.append(f"columns in this order: {', '.join(self.columns)}")
        if self.mean:
            lines.append("take off 'mean' and divide by 'deviation', number by number")
        return [*lines, f"float32, samples × {shape_text(self.shape)}"]

    # Files as samples.

    def read(self, path: Path) -> Iterator[tuple[list[str], np.ndarray]]:
        """What a path holds, in pieces: the name of each sample, and the samples."""
        if not path.exists():
            raise DataError(f"no such file or folder: {str(path)!r}")
        ending = path.suffix.lower()
        if path.is_dir():
            if not (files := pictures_below(path)):
                raise DataError(f"{path} has no pictures ({', '.join(IMAGE_SUFFIXES)})")
            yield from self._read_pictures(path, files)
        elif ending in IMAGE_SUFFIXES:
            yield from self._read_pictures(path.parent, [path])
        elif ending == ".csv":
            sheet = read_sheet(path, _separator(path))
            yield [f"line {line}" for line in sheet.lines], self.from_sheet(sheet)
        elif ending in (".npz", ".npy"):
            x = self.from_array(_samples_in(path), str(path))
            yield [f"sample {number}" for number in range(len(x))], x
        else:
            raise DataError(f"{path} is no picture, .csv, .npz or .npy file, and no folder of some")

    def from_picture(self, content: bytes) -> np.ndarray:
        """One picture, as the bytes of its file."""
        self._check_pictures()
        picture = decoded_picture(content, self._look())
        return self._numbers(channels_first(picture[None]))

    def from_sheet(self, sheet: Sheet) -> np.ndarray:
        if self.columns:
            known = self._column_names()
            x = np.stack([self._column(sheet, title, known) for title in self.columns], 1)
        else:
            x = self._plain_columns(sheet)
        if self.pixel_cells:
            wrong = np.argwhere((x < 0) | (x > 255) | (x != np.floor(x)))
            if len(wrong):
                row, column = wrong[0]
                where = sheet.cell(row, self.columns[column])
                raise DataError(f"{where}: {x[row, column]:g} is no pixel: a whole number, 0 … 255")
            x = scaled(x.astype(np.uint8))
        return self.from_array(x.reshape(-1, *self.shape), str(sheet.path))

    def from_array(self, values: Any, what: str) -> np.ndarray:
        """Samples as the network takes them."""
        x = checked_samples(values, what)
        if self.vocabulary:
            self._check_shape(x, what)
            check_tokens(x, self.vocabulary, what)
            return x.astype(np.int64)
        x = self._in_shape(x)
        self._check_shape(x, what)
        return self._numbers(x, what)

    def _read_pictures(
        self, root: Path, files: Sequence[Path]
    ) -> Iterator[tuple[list[str], np.ndarray]]:
        self._check_pictures()
        for start in range(0, len(files), AT_ONCE):
            some = files[start : start + AT_ONCE]
            pixels = read_pictures(some, self._look()).pixels
            yield [str(file.relative_to(root)) for file in some], self._numbers(pixels)

    def _look(self) -> Look:
        return Look(self.shape[1:], grey=self.shape[0] == 1)

    def _check_pictures(self) -> None:
        if not self.takes_pictures:
            why = "" if len(self.shape) != 3 or self.pixels else ", scaled in a way of its own"
            raise DataError(f"this model does not take pictures: it takes {self.described()}{why}")

    def _numbers(self, x: np.ndarray, what: str = "") -> np.ndarray:
        """Bytes and floating point as float32, scaled as in training."""
        if x.dtype == np.uint8 and not self.mean:
            return self._from_bytes(x, what)
        if self.pixels:
            self._check_range(x, what)
        x = x.astype(np.float64)
        if self.mean:
            x -= np.reshape(self.mean, self.shape)
            x /= np.reshape(self.deviation, self.shape)
        result = x.astype(np.float32)
        if not np.isfinite(result).all():
            raise DataError(f"{what} has a value too far off those of training")
        return result

    def _from_bytes(self, x: np.ndarray, what: str) -> np.ndarray:
        if not self.pixels:
            raise DataError(
                f"{what} is bytes (uint8), which this model was not trained on: save the numbers "
                "it was trained on, as float32"
            )
        low, high = self.pixels
        if (low, high) == RANGES[0]:
            return scaled(x)  # to the last bit as in training
        return (x.astype(np.float32) / 255 * (high - low) + low).astype(np.float32)

    def _check_range(self, x: np.ndarray, what: str) -> None:
        low, high = self.pixels
        slack = BEYOND * (high - low)
        if x.min() < low - slack or x.max() > high + slack:
            raise DataError(
                f"{what}: values from {x.min():.3g} to {x.max():.3g}, this model takes pixels from "
                f"{low:g} to {high:g} (bytes, uint8, are scaled by themselves)"
            )

    def _in_shape(self, x: np.ndarray) -> np.ndarray:
        """Pictures may have their channels last, or no dimension for one channel."""
        if x.shape[1:] == self.shape or len(self.shape) != 3:
            return x
        if x.shape[1:] == (*self.shape[1:], self.shape[0]):
            return np.ascontiguousarray(np.moveaxis(x, -1, 1))
        if self.shape[0] == 1 and x.shape[1:] == self.shape[1:]:
            return x[:, None]
        return x

    def _check_shape(self, x: np.ndarray, what: str) -> None:
        if x.shape[1:] != self.shape:
            raise DataError(
                f"{what}: samples are {shape_text(x.shape[1:])}, this model takes "
                f"{shape_text(self.shape)}: {self.described()}"
            )

    # Tables.

    def _column_names(self) -> list[str]:
        """Of the file: a column of words is several numbers."""
        return list(dict.fromkeys(title.partition("=")[0] for title in self.columns))

    def _column(self, sheet: Sheet, title: str, known: Sequence[str]) -> np.ndarray:
        if title in sheet.columns:
            return numbers(sheet, title)
        name, equals, word = title.partition("=")
        if not equals or name not in sheet.columns:
            raise DataError(f"{sheet.path} has no column '{name}'; this model takes {_few(known)}")
        words = [t.partition("=")[2] for t in self.columns if t.startswith(f"{name}=")]
        cells = sheet.columns[name]
        for row, cell in enumerate(cells):
            if cell not in words:
                where = sheet.cell(row, name)
                raise DataError(f"{where}: {cell!r} did not occur in training; {_few(words)} did")
        return np.array([float(cell == word) for cell in cells])

    def _plain_columns(self, sheet: Sheet) -> np.ndarray:
        count = math.prod(self.shape)
        if len(sheet.columns) != count:
            raise DataError(
                f"{sheet.path} has {len(sheet.columns)} columns, this model takes {count} numbers "
                f"a row ({shape_text(self.shape)}), and no label"
            )
        return np.stack([numbers(sheet, name) for name in sheet.columns], 1)


def needs_of(federation: Federation, inputs: Inputs, client: int = 0) -> Needs:
    """Of the models of a federation; ``client``: whose samples are looked at, where those of all
    are not in memory."""
    samples, origin = federation.samples, federation.samples.origin
    scales: Mapping[str, Any] = federation.partition_facts.get("standardised", {})
    x = samples.x
    if federation.distant is not None and federation.clients:
        x = federation.distant.client(client)[0]
    return Needs(
        shape=inputs.shape,
        classes=samples.classes,
        names=tuple(origin.get("classes", ())),
        vocabulary=inputs.vocabulary,
        columns=tuple(origin.get("columns", ())),
        mean=tuple(np.ravel(scales.get("mean", ())).tolist()),
        deviation=tuple(np.ravel(scales.get("deviation", ())).tolist()),
        pixels=() if inputs.tokens or scales else pixel_range(samples.numbers(_some(x))),
        pixel_cells=origin.get("values") == BYTES,
    )


def pixel_range(x: np.ndarray) -> tuple[float, ...]:
    """What black and white are, by the range of some samples; nothing where they are no pixels."""
    some = _some(x)
    if not some.size or some.dtype.kind != "f":
        return ()
    low, high = float(some.min()), float(some.max())
    if low < 0:
        return RANGES[0] if low >= -1 and high <= 1 else ()
    if high <= 1:
        return RANGES[1]
    return RANGES[2] if DARKEST_WHITE <= high <= 255 else ()


def _some(x: np.ndarray) -> np.ndarray:
    """Of so few, as many as there are."""
    return x[:: max(1, len(x) // LOOKED_AT)]


def _samples_in(path: Path) -> np.ndarray:
    found = load_arrays(path)
    if isinstance(found, np.ndarray):
        return found
    for name in ("x", "images"):
        if name in found:
            return found[name]
    raise DataError(f"{path}: no array 'x' (numpy.savez(…, x=samples))")


def _separator(path: Path) -> str:
    """The one that is most often in the first line."""
    with open_file(path) as file:
        first = file.readline(1 << 20).decode("utf-8", "replace")
    return max(SEPARATORS, key=first.count)


def _few(names: Sequence[str], most: int = 8) -> str:
    quoted = ", ".join(f"'{name}'" for name in names[:most])
    return quoted + (f" and {len(names) - most} others" if len(names) > most else "")
