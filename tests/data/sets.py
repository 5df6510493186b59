"""A small CIFAR-10 in every layout it comes in: 20 training images and 10 test images."""

import io
import json
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from perfed.data.cifar import CIFAR10

TRAIN, TEST = 20, 10
PIXELS = np.random.default_rng(0).integers(256, size=(TRAIN + TEST, 3, 32, 32), dtype=np.uint8)
LABELS = np.concatenate([np.repeat(np.arange(10), 2), np.arange(10)])  # by class, as folders are
BATCHES = [slice(start, start + 4) for start in range(0, TRAIN, 4)] + [slice(TRAIN, None)]
BATCH_NAMES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5"]
BATCH_NAMES += ["test_batch"]


class Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes what Python 2 and the numpy of its time wrote, as in the official archives."""

    dispatch = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]  # noqa: RUF012

    def save_string(self, value: bytes | str) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    def save_truth(self, value: bool) -> None:
        self.write(pickle.BININT1 + bytes([value]))

    dispatch[bytes] = save_string
    dispatch[str] = save_string
    dispatch[bool] = save_truth

    def save_global(self, value: Any, name: str | None = None) -> None:
        module = value.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{name or value.__qualname__}\n".encode())
        self.memoize(value)


def python2_pickle(value: Any) -> bytes:
    out = io.BytesIO()
    Python2Pickler(out, protocol=2).dump(value)
    return out.getvalue()


def batch(part: slice, key: bytes = b"labels") -> dict[bytes, Any]:
    rows = PIXELS[part].reshape(-1, 3072)
    names = [b"%d.png" % number for number in range(len(rows))]
    label = b"a batch of 6"
    return {
        b"batch_label": label,
        key: LABELS[part].tolist(),
        b"data": rows,
        b"filenames": names,
    }


def official_folder(root: Path) -> Path:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, part in zip(BATCH_NAMES, BATCHES, strict=True):
        (folder / name).write_bytes(python2_pickle(batch(part)))
    meta = {b"label_names": [name.encode() for name in CIFAR10.classes]}
    (folder / "batches.meta").write_bytes(python2_pickle(meta))
    (folder / "readme.html").write_text("<a>")
    return folder


def official_cifar100_folder(root: Path) -> Path:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, part in (("train", slice(0, TRAIN)), ("test", slice(TRAIN, None))):
        content = batch(part, b"fine_labels") | {b"coarse_labels": [0] * len(LABELS[part])}
        (folder / name).write_bytes(python2_pickle(content))
    (folder / "meta").write_bytes(python2_pickle({b"fine_label_names": [b"apple"]}))
    return folder


def packed(folder: Path, name: str) -> Path:
    """``folder`` as an archive beside it, with what was in it; the folder goes."""
    archive = folder.parent / name
    with tarfile.open(archive, "w:gz" if name.endswith("gz") else "w") as file:
        file.add(folder, folder.name)
    for entry in folder.iterdir():
        entry.unlink()
    folder.rmdir()
    return archive


def tfjs_package(root: Path) -> Path:
    folder = root / "package"
    folder.mkdir(parents=True)
    for name, part in zip(BATCH_NAMES, BATCHES, strict=True):
        rows = PIXELS[part].transpose(0, 2, 3, 1).reshape(-1, 1024, 3)
        Image.fromarray(rows).save(folder / f"{name}.png")
    (folder / "train_lables.json").write_text(json.dumps(LABELS[:TRAIN].tolist()))
    (folder / "test_lables.json").write_text(json.dumps(LABELS[TRAIN:].tolist()))
    (folder / "package.json").write_text("{}")
    return folder


def image_folders(root: Path, splits: bool = True, names: tuple[str, ...] = ()) -> Path:
    names = names or CIFAR10.classes
    for number, (pixels, label) in enumerate(zip(PIXELS, LABELS, strict=True)):
        split = ("train" if number < TRAIN else "test") if splits else ""
        folder = root / split / names[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.transpose(1, 2, 0)).save(folder / f"{number:04}.png")
        (folder / ".hidden.png").touch()
        (folder / "Thumbs.db").touch()
    return root


def npz(path: Path, channels_last: bool = False, **arrays: np.ndarray) -> Path:
    pixels = PIXELS.transpose(0, 2, 3, 1) if channels_last else PIXELS
    np.savez(path, **(arrays or {"images": pixels, "labels": LABELS}))
    return path
