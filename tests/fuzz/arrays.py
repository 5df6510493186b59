"""npy and npz: what is read is what numpy reads, and no more than the file may unpack to."""

from __future__ import annotations

import io
import zipfile

import numpy as np

from perfed.data.arrays import MOST_UNPACKED, load_arrays
from perfed.data.files import Npz
from tests.fuzz.target import ODD_NUMBERS, Target


class Arrays(Target):
    tokens = (
        *(
            b"\x93NUMPY\x01\x00",
            b"\x93NUMPY\x02\x00",
            b"'descr': '|O'",
            b"'<f8'",
            b"'<U9'",
            b"'>i2'",
        ),
        *(b"'shape': (", b"True", b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"\xff\xff\xff\xff"),
        *(
            b"(2199023255552,)",
            b"(-1,)",
            b"()",
            b"[('a', '<f4')]",
            b"x.npy",
            b"y.npy",
            *ODD_NUMBERS,
        ),
    )

    def seeds(self) -> list[bytes]:
        x, y = np.arange(8.0, dtype=np.float32).reshape(4, 2), np.array([0, 1, 0, 1])
        single, stored, deflated = io.BytesIO(), io.BytesIO(), io.BytesIO()
        np.save(single, x)
        np.savez(stored, x=x, y=y)
        np.savez_compressed(deflated, x=x, y=y, public=x)
        return [single.getvalue(), stored.getvalue(), deflated.getvalue()]

    def read(self, data: bytes) -> None:
        path = self.folder / ("fuzzed.npy" if data.startswith(b"\x93") else "fuzzed.npz")
        path.write_bytes(data)
        read = load_arrays(path)
        arrays = {"": read} if isinstance(read, np.ndarray) else read
        assert sum(array.nbytes for array in arrays.values()) <= MOST_UNPACKED
        assert not any(array.dtype.hasobject for array in arrays.values())
        if isinstance(read, np.ndarray):
            theirs = np.load(path, allow_pickle=False)
            assert theirs.shape == read.shape
            assert theirs.tobytes() == read.tobytes()
            return
        assert set(read) <= {n.removesuffix(".npy") for n in zipfile.ZipFile(path).namelist()}
        samples = Npz(path=str(path), public=0).load(0)
        assert np.isfinite(samples.x).all()
        assert samples.y.min() >= 0
        assert samples.y.max() < samples.classes
