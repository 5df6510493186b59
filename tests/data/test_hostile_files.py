"""Files made to break, to fill or to hold up whoever reads them: one line each, at once."""

import gzip
import io
import os
import re
import signal
import struct
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from perfed import datasets
from perfed.core.errors import ConfigError, DataError
from perfed.data import arrays, readers
from perfed.data.cifar import CIFAR10
from perfed.data.datasets import Samples
from perfed.data.readers import archive_files, read_array, read_arrays, read_images
from perfed.data.tables import read_sheet
from tests.data import own_files, sets

MIB = 1 << 20


def load(name: str, path: Path, **options: Any) -> Samples:
    return datasets.build({"name": name, "path": str(path), **options}).load(0)


@contextmanager
def refused(message: str, seconds: int = 5, memory: int = 64 * MIB) -> Iterator[None]:
    """One line that says ``message``, soon, and without much memory."""

    def too_late(*_: Any) -> None:
        raise AssertionError(f"still at it after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(seconds)
    tracemalloc.start()
    try:
        with pytest.raises((DataError, ConfigError), match=message) as caught:
            yield
        assert tracemalloc.get_traced_memory()[1] < memory
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600
    finally:
        tracemalloc.stop()
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def npy(header: str, content: bytes = b"", version: int = 1) -> bytes:
    text = header.encode("latin-1") + b"\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + content


def header(shape: str, kind: str = "<f8") -> str:
    return f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}}}"


def zipped(member: bytes, packing: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", packing) as archive:
        archive.writestr("x.npy", member)
    return out.getvalue()


def saved(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def with_flag(content: bytes, offset: int, value: int) -> bytes:
    """A zip of one member with another value in its local and its central header."""
    changed = bytearray(content)
    central = content.index(b"PK\x01\x02")
    changed[6 + offset] = changed[central + 8 + offset] = value
    return bytes(changed)


ENCRYPTED, PACKING = 0, 2
PLAIN = zipped(saved(np.zeros((4, 2))))
LZMA = zipped(saved(np.random.default_rng(0).normal(size=(40, 20))), zipfile.ZIP_LZMA)

HOSTILE: dict[str, tuple[bytes, str]] = {
    "encrypted": (with_flag(PLAIN, ENCRYPTED, 1), "'x.npy' is encrypted: save it without"),
    "unknown packing": (with_flag(PLAIN, PACKING, 77), r"numpy does not write \(number 77\)"),
    "broken LZMA": (LZMA[:60] + b"\xff" * 200 + LZMA[260:], "numpy does not write"),
    "16 TiB": (npy(header("(2199023255552,)")), r"\(17,592,186,044,416 bytes\), but 0 bytes"),
    "16 TiB, zipped": (zipped(npy(header("(2199023255552,)"))), "array 'x': announces 21990"),
    "more than a count": (npy(header(f"({10**30}, 2)")), "announces 10000"),
    "less than nothing": (npy(header("(-1, 2)"), bytes(16)), "announces -1×2 values"),
    "no size": (npy(header("(9999999999, 2)", "|V0")), "but 0 bytes follow"),
    "tokenize": (npy("{'descr': '<f8', 'shape': (1L,"), "cannot be read"),
    "tokenize, zipped": (zipped(npy("'''\n(L")), "array 'x' cannot be read"),
    "nested": (npy("(" * 5000), "cannot be read"),
    "keys of several types": (npy("{1: 2, 'a': 3}"), "cannot be read"),
    "long header": (npy(" " * 60000), "cannot be read"),
    "header cut off": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", "cannot be read"),
    "format 9": (b"\x93NUMPY\x09\x00" + bytes(20), "cannot be read|must be 1.0 or 2.0"),
    "objects": (npy(header("(1, 1)", "|O"), bytes(100)), "Python objects, which are never"),
    "a pickle": (b"\x80\x04K\x01.", "neither .npy nor .npz"),
    "no array in it": (zipped(b"hello"), "'x.npy' in it is no array"),
    "zip cut off": (PLAIN[:-30], "cannot be read"),
    "checksum": (PLAIN.replace(bytes(64), bytes(63) + b"\x01"), "Bad CRC"),
    "nothing": (b"", "neither .npy nor .npz"),
}


@pytest.mark.attack(56)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_array_file_is_one_line(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with refused(rf"a\.npz: .*({message})"):
        read_arrays(path)
    with refused(message):
        load("npz", path)
    path = path.rename(tmp_path / "a.npy")
    with refused(message):
        read_array(path)


@pytest.mark.attack(56)
def test_a_zip_bomb_is_refused_before_it_unpacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros((4000, 5000), np.uint8), y=np.zeros(4000, int))
    assert read_arrays(path)["x"].shape == (4000, 5000)  # small enough, however well it packs
    monkeypatch.setattr(arrays, "MOST_UNPACKED", MIB)
    with refused("bytes that unpack to 20,032,256, .* save them unpacked", memory=MIB):
        load("npz", path)
    np.savez(path, x=np.zeros((4000, 5000), np.uint8))  # as large, and honest
    assert read_arrays(path)["x"].shape == (4000, 5000)


def test_arrays_of_every_packing_and_order_are_as_numpy_reads_them(tmp_path: Path) -> None:
    kept = {
        "x": np.asfortranarray(np.random.default_rng(0).normal(size=(5, 7))),
        "y": np.arange(5, dtype=">i4"),
        "empty": np.zeros((0, 3)),
        "one": np.array(3),
        "words": np.array(["a", "bcd"]),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "a.npz", **kept)  # type: ignore[arg-type]
        found = read_arrays(tmp_path / "a.npz")
        assert list(found) == list(kept)
        for name, array in kept.items():
            assert np.array_equal(found[name], array)
            assert found[name].dtype == array.dtype
    with open(tmp_path / "b.npy", "wb") as file:
        np.lib.format.write_array(file, kept["x"], version=(2, 0))
    assert np.array_equal(read_array(tmp_path / "b.npy"), kept["x"])
    (tmp_path / "old.npy").write_bytes(npy(header("(2L, 1L)"), bytes(16)))  # as Python 2 wrote
    assert read_array(tmp_path / "old.npy").shape == (2, 1)


def tar_of(name: str, size: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = size
        archive.addfile(member, io.BytesIO(bytes(size)))
    return out.getvalue()


def sparse_tar(size: int) -> bytes:
    """A member of a block whose header says that it is of ``size``, the rest a hole."""
    member = tarfile.TarInfo("data_batch_1")
    member.type = tarfile.GNUTYPE_SPARSE
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[483:495] = b"%011o\0" % size
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + bytes(1024)


BOMBS: dict[str, Callable[[], bytes]] = {
    "wanted": lambda: gzip.compress(tar_of("data_batch_1", 8 * MIB)),
    "not wanted": lambda: gzip.compress(tar_of("other", 8 * MIB)),
    "a long name": lambda: gzip.compress(tar_of("n" * 8 * MIB, 0)),
    "behind the end": lambda: gzip.compress(tar_of("other", 0) + bytes(8 * MIB)),
    "in parts": lambda: gzip.compress(tar_of("other", 0)) + 9 * gzip.compress(bytes(MIB)),
    "a hole": lambda: sparse_tar(8 * MIB),
    "a hole, packed": lambda: gzip.compress(sparse_tar(8 * MIB)),
}


@pytest.mark.attack(58)
@pytest.mark.parametrize("name", BOMBS)
def test_an_archive_unpacks_to_so_much_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(BOMBS[name]())
    monkeypatch.setattr(readers, "MOST_IN_ARCHIVE", 2 * MIB)
    with refused("unpacks to more than 2,097,152 bytes: .* give the folder", memory=7 * MIB):
        archive_files(path, {"data_batch_1"})


def test_no_other_packing_is_unpacked_to_see_whether_it_is_a_tar(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        archive.addfile(tarfile.TarInfo("n" * 16 * MIB))
    with refused("is none of", memory=MIB):
        read_images(path, CIFAR10.layouts)


@pytest.mark.attack(59)
def test_a_table_of_many_columns_is_read_at_once(tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(40_000)]
    path = own_files.table(tmp_path / "a.csv", [range(40_000)], names)
    start = time.monotonic()
    assert len(read_sheet(path).columns) == 40_000
    assert time.monotonic() - start < 4  # it was 15 seconds
    own_files.table(path, [range(40_001)], [*names, "c39999"])
    with refused("column 40000 is named 'c39999', like another"):
        read_sheet(path)


@pytest.mark.attack(60)
@pytest.mark.parametrize("labeled", [True, False])
def test_a_pipe_is_no_picture(tmp_path: Path, labeled: bool) -> None:
    own_files.photos(tmp_path, ("a", "b"), each=2)
    os.mkfifo(tmp_path / "a" / "f.png")
    with refused(r"a/f\.png is no file that can be read, but a pipe or a device"):
        if labeled:
            load("images", tmp_path)
        datasets.build({"name": "images", "path": str(tmp_path)}).unlabeled(0)
    (tmp_path / "a" / "f.png").unlink()
    (tmp_path / "a" / "f.png").symlink_to(tmp_path / "b" / "001.png")  # a link to a file is one
    assert len(load("images", tmp_path).x) == 5
    (tmp_path / "a" / "d.png").mkdir()
    with refused(r"a/d\.png is a folder, must be a file"):
        load("images", tmp_path)


@pytest.mark.attack(60)
@pytest.mark.parametrize("kind", ["a.npz", "a.npy", "a.csv"])
def test_a_pipe_is_no_table_and_no_array(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / kind)
    with refused("is no file that can be read, but a pipe or a device"):
        load("csv" if kind == "a.csv" else "npz", tmp_path / kind)
    with refused("is none of"):
        read_images(tmp_path / kind)
    with refused("is a folder, must be a file"):
        load("csv" if kind == "a.csv" else "npz", tmp_path)


def blank_png(width: int, height: int) -> bytes:
    """All black, 1 bit for a pixel."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    size = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    row = bytes(1 + (width + 7) // 8)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", size)
        + chunk(b"IDAT", zlib.compress(row * height))
        + chunk(b"IEND", b"")
    )


@pytest.mark.attack(61)
@pytest.mark.parametrize("width", [5_000, 12_000, 20_000])  # 60, 144 and 240 million
def test_a_picture_of_too_many_pixels_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    own_files.photos(tmp_path, ("a",), each=2)
    (tmp_path / "a" / "large.png").write_bytes(blank_png(width, 12_000))

    def decodes(*_: Any) -> None:
        raise AssertionError("decoded")

    with monkeypatch.context() as patch:
        patch.setattr("PIL.ImageFile.ImageFile.load", decodes)
        with refused(r"large\.png: is no picture that can be read: .*pixels"):
            readers.read_pictures([tmp_path / "a" / "large.png"])
    with refused(r"large\.png: is no picture that can be read"):
        load("images", tmp_path, size=[8, 8])


@pytest.mark.attack(62)
def test_an_eps_file_never_reaches_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.png"
    Image.new("RGB", (8, 8)).save(path, "EPS")

    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("the reader of EPS was called")

    monkeypatch.setattr(EpsImagePlugin.EpsImageFile, "_open", reached)
    with refused("is no picture that can be read: none of PNG, JPEG, BMP, GIF, TIFF, WEBP"):
        readers.read_pictures([path])


@pytest.mark.parametrize("suffix", readers.IMAGE_SUFFIXES)
def test_every_ending_that_is_meant_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"f{suffix}"
    Image.new("RGB", (8, 6), (255, 255, 255)).save(path)
    assert readers.read_pictures([path]).pixels.shape == (1, 3, 6, 8)


def test_lists_without_end_are_no_labels(tmp_path: Path) -> None:
    folder = sets.tfjs_package(tmp_path)
    (folder / "test_lables.json").write_text("[" * 100_000)
    with refused(re.escape("test_lables.json: is not valid JSON")):
        read_images(folder, CIFAR10.layouts)
