"""Your own arrays, and your own pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from perfed.core.errors import ConfigError, DataError, shape_text
from perfed.core.inputs import Tokens
from perfed.core.notices import say_once
from perfed.core.schema import option
from perfed.data.datasets import datasets
from perfed.data.picture_layout import LAYOUT_HELP, Layout, channels_first
from perfed.data.readers import (
    Images,
    Look,
    class_folders,
    pictures_below,
    read_array,
    read_arrays,
    read_image_folders,
    read_pictures,
)
from perfed.data.sources import (
    COLOURS_HELP,
    SIZE_HELP,
    Contents,
    Files,
    checked_labels,
    checked_samples,
)
from perfed.data.tokens import VOCABULARY_HELP, common_tokens, tokens_in


@datasets.register("npz")
@dataclass(frozen=True)
class Npz(Files):
    """Your own arrays: ``x``, ``y``, and if there are any ``public`` and ``client`` (an id each).

    Pictures have any layout; bytes (uint8, 0 … 255) are scaled to −1 … 1. With ``vocabulary``,
    samples are tokens.
    """

    endings = (".npz", ".npy")

    path: str = option("", "the .npz file, or an .npy file of samples alone")
    labels: str = option("", "with an .npy file of samples: the .npy file of their labels")
    layout: Layout = option("auto", LAYOUT_HELP)
    vocabulary: int = option(0, VOCABULARY_HELP, ge=0)

    def read_one(self, path: Path, labeled: bool) -> Contents:
        try:
            return self._read(path, labeled)
        except DataError as error:
            text = str(error)
            raise DataError(text if str(path) in text else f"{path}: {text}") from None

    def _read(self, path: Path, labeled: bool) -> Contents:
        if path.suffix == ".npy":
            arrays = {"x": read_array(path)}
            if self.labels:
                arrays["y"] = read_array(Path(self.labels).expanduser())
        elif self.labels:
            raise ConfigError("only for an .npy file: an .npz file has its labels in 'y'", "labels")
        else:
            arrays = read_arrays(path)
        x, y, public, client_ids = (arrays.get(n) for n in ("x", "y", "public", "client"))
        if x is None and not labeled:
            x = public  # what one dataset holds out may serve another
        if x is None:
            raise DataError("no array 'x'")
        if labeled and y is None:
            raise DataError("no array 'y'" if path.suffix == ".npz" else "no labels: set 'labels'")
        x, tokens = self._samples(x, "'x'")
        if not labeled:
            return Contents(x, tokens=tokens)
        y = checked_labels(y, len(x))
        if client_ids is not None and client_ids.shape != y.shape:
            raise DataError(f"{len(y)} samples but {client_ids.size} client ids")
        if public is not None:
            public, of_public = self._samples(public, "'public'")
            tokens = common_tokens(tokens, of_public)
            if public.shape[1:] != x.shape[1:]:
                theirs, ours = shape_text(public.shape[1:]), shape_text(x.shape[1:])
                raise DataError(f"public samples are {theirs}, private ones {ours}")
        return Contents(x, y, client_ids=client_ids, public=public, tokens=tokens)

    def _samples(self, values: np.ndarray, what: str) -> tuple[np.ndarray, Tokens | None]:
        x = checked_samples(values, what)
        tokens = tokens_in(x, self.vocabulary, what)
        if tokens is None and x.dtype == np.uint8 and x.ndim == 2:
            say_once(
                f"samples of {what} are bytes, samples × length: they are taken for pixels and "
                "scaled to −1 … 1; if they are tokens, set data.vocabulary"
            )
        return (x if tokens else channels_first(x, self.layout, what)), tokens


@datasets.register("images")
@dataclass(frozen=True)
class ImageFolders(Files):
    """Your own pictures (PNG, JPEG, …), a folder for each class: ``photos/cat/1.png``.

    Folders train, val and test above them are taken together: every client makes parts of its own.
    As a public set, any pictures below the path will do.
    """

    path: str = option("", "the folder of images, with one folder per class")
    size: tuple[int, ...] = option((), SIZE_HELP, ge=1)
    colours: Literal["rgb", "grey"] = option("rgb", COLOURS_HELP)

    def validate(self) -> None:
        check_size(self.size)

    def read_one(self, path: Path, labeled: bool) -> Contents:
        if not path.is_dir():
            raise DataError(f"no such folder: {str(path)!r}")
        look = Look(self.size, self.colours == "grey")
        images = self._read(path, look, labeled)
        return Contents(images.pixels, images.labels, images.names, sizes=images.sizes)

    def _read(self, path: Path, look: Look, labeled: bool) -> Images:
        try:
            if labeled:
                self._check_folders(path)
                return read_image_folders(path, look=look)
            if not (files := pictures_below(path)):
                raise DataError(f"{path} has no pictures")
            return read_pictures(files, look)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
        except DataError as error:
            hint = "; set 'size' to have them resized" if "one size" in str(error) else ""
            raise DataError(f"{error}{hint}") from None

    def _check_folders(self, path: Path) -> None:
        if class_folders(path):
            return
        inner = [entry.name for entry in sorted(path.iterdir()) if entry.is_dir()]
        if any(class_folders(path / name) for name in inner):
            hint = f"; if '{inner[0]}' is a client's, set by_client: true"
        else:
            hint = ": it needs a folder of pictures for each class"
        raise DataError(f"{path} has no folders with pictures in them{hint}")


def check_size(size: tuple[int, ...]) -> None:
    if len(size) not in (0, 2):
        raise ConfigError(f"{list(size)} is not a height and a width, as [32, 32]", "size")
