"""Tensor files: checkpoints, final models, and every message's encoding."""

from __future__ import annotations

import torch

from perfed.core import tensorfile
from perfed.core.errors import PerfedError, RunError
from tests.fuzz.target import ODD_JSON, Target


class TensorFiles(Target):
    """The input is the header's text, a zero byte, and the payload; or a whole file."""

    tokens = (
        *ODD_JSON,
        *(b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b"[0,8]", b'"a":'),
        *(b'"F32"', b'"BOOL"', b'"I64"', b'"BF16"', b"[0,0]", b"[-1]", b'{"dtype":'),
    )

    def seeds(self) -> list[bytes]:
        contents = [
            tensorfile.encode({"a": torch.arange(4.0), "b": torch.zeros(2, 0)}),
            tensorfile.encode({"x/y": torch.tensor([True, False]), "n": torch.tensor(3)}),
            tensorfile.encode({"h": torch.ones(2, 2, dtype=torch.bfloat16)}, {"about": "text"}),
        ]
        contents.append(tensorfile.encode({"long": torch.arange(99.0)}))
        return [*contents, *(with_zero(data) for data in contents)]

    def read(self, data: bytes) -> None:
        data = with_length(data)
        path = self.folder / "fuzzed.safetensors"
        path.write_bytes(data)
        try:
            tensors, metadata = tensorfile.decode(data)
        except tensorfile.MALFORMED as error:
            try:
                tensorfile.load(path)
            except RunError:
                raise PerfedError("malformed") from error
            raise AssertionError("load takes what decode does not") from error
        length = int.from_bytes(data[:8], "little")
        payload = data[8 + length :]
        assert sum(t.nbytes for t in tensors.values()) == len(payload)
        again = tensorfile.encode(tensors, metadata)
        assert again.endswith(payload)
        known, words = tensorfile.decode(again)
        assert (list(known), words) == (list(tensors), metadata)
        assert all(t.shape == known[name].shape for name, t in tensors.items())


def with_length(data: bytes) -> bytes:
    """What begins with a brace gets its length before it, so that most headers are read."""
    if not data.startswith(b"{"):
        return data
    header, _, payload = data.partition(b"\0")
    return len(header).to_bytes(8, "little") + header + payload


def with_zero(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length] + b"\0" + data[8 + length :]
