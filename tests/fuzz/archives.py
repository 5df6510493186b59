"""Archives of images, the pickles in them, and pictures."""

from __future__ import annotations

import gzip
import io
import tarfile

import numpy as np
from PIL import Image

from perfed.data.cifar import CIFAR10, CIFAR100
from perfed.data.readers import MOST_PIXELS, decoded_picture, read_images, unpickled_arrays
from tests.data import sets
from tests.fuzz.target import Target

TAR, PACKED, PICKLE, PICTURE = range(4)
ROWS = {b"data": np.zeros((1, 3072), np.uint8), b"fine_labels": [3]}


class Archives(Target):
    """The first byte says of what kind the rest is."""

    tokens = (
        *(b"ustar\x00", b"test_batch", b"train", b"test", b"../../x", b"/etc/x", b"\x1f\x8b\x08"),
        *(
            b"cos\nsystem\n",
            b"cbuiltins\neval\n",
            b"(lp0\n",
            b"tR.",
            b"\x8a\xff",
            b"K\xff",
            b"U\xff",
        ),
        *(
            b"numpy.core.multiarray\n_reconstruct\n",
            b"IHDR",
            b"IDAT",
            b"\xff\xd8\xff",
            b"%!PS",
            b".",
        ),
        *(b"0000777\x00", b"77777777777\x00", b"\x80\x00\x00\x00", b"x", b"L", b"S", b"1"),
    )

    def seeds(self) -> list[bytes]:
        pickles = {name: sets.python2_pickle(ROWS) for name in ("train", "test")}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name, content in pickles.items():
                member = tarfile.TarInfo(f"cifar-100-python/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        pictures = []
        for kind in ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP"):
            out = io.BytesIO()
            Image.fromarray(sets.PIXELS[0].transpose(1, 2, 0)).save(out, kind)
            pictures.append(bytes([PICTURE]) + out.getvalue())
        tar = packed.getvalue()
        return [
            bytes([TAR]) + tar,
            bytes([PACKED]) + tar,
            bytes([PICKLE]) + pickles["train"],
            *pictures,
        ]

    def read(self, data: bytes) -> None:
        kind, content = (data[0] % 4 if data else 0), data[1:]
        if kind == PICKLE:
            self._check_pickle(unpickled_arrays(content))
        elif kind == PICTURE:
            pixels = decoded_picture(content)
            assert pixels.dtype == np.uint8
            assert pixels.shape[2:] == (3,)
            assert pixels.size <= 3 * MOST_PIXELS
        else:
            path = self.folder / "fuzzed.tar"
            path.write_bytes(gzip.compress(content, 1) if kind == PACKED else content)
            images = read_images(path, [*CIFAR10.layouts, *CIFAR100.layouts])
            assert images.pixels.dtype == np.uint8

    def _check_pickle(self, read: dict[object, object]) -> None:
        plain = (np.ndarray, list, tuple, str, bytes, int, float, bool, dict, type(None))
        for value in read.values():
            assert isinstance(value, plain), type(value)
