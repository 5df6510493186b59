"""Messages: what is admitted is what was declared, by a check that is written anew here."""

from __future__ import annotations

import torch
from torch import Tensor

from perfed.core import tensorfile
from perfed.core.admission import check
from perfed.core.algorithm import algorithms
from perfed.core.declaration import LARGEST, TOLERANCE, Known
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.tree import Weights, flatten
from tests.fuzz.target import Target
from tests.fuzz.tensor_files import TensorFiles, with_length, with_zero

P, N, SAMPLES = 40, 2, 7
MODEL = Weights(
    {"body.weight": torch.zeros(2, 3), "head.weight": torch.zeros(2, 2)},
    {"mean": torch.zeros(2), "count": torch.tensor(0)},
)
NAMES = (
    "perfed-ckt",
    "perfed-evidence",
    "perfed-kin",
    "fedavg",
    "scaffold",
    "hypcluster",
    "fedfomo",
    "local",
)


class Messages(Target):
    """The first byte is the algorithm; the rest, a tensor file as in ``TensorFiles``."""

    tokens = (
        *TensorFiles.tokens,
        b"soft_decisions",
        b"model/params/",
        b"samples",
        b"\x7f\xc0",
        b"/",
    )

    def __init__(self, folder: object = None) -> None:
        self.declared = [algorithms.build(name).messages() for name in NAMES]
        self.received = Message(models={"0": MODEL, "1": MODEL})
        self.known = Known(
            {"P": P, "N": N}, SAMPLES, lambda _: MODEL, lambda _: "head", self.received
        )

    def seeds(self) -> list[bytes]:
        soft = torch.full((P, N), 1 / N)
        contents = {
            "perfed-ckt": {"soft_decisions": soft},
            "fedavg": {"model": MODEL, "samples": torch.tensor(SAMPLES)},
            "local": {},
        }
        return [
            bytes([NAMES.index(name)]) + with_zero(tensorfile.encode(flatten(content)))
            for name, content in contents.items()
        ]

    def read(self, data: bytes) -> None:
        number = data[0] % len(NAMES) if data else 0
        try:
            arrays, _ = tensorfile.decode(with_length(data[1:]), tensorfile.MESSAGE)
        except tensorfile.MALFORMED as error:
            raise Refused("no message") from error
        check(Message.from_arrays(arrays), self.declared[number].up, self.known)
        self._must_be_admissible(NAMES[number], arrays)

    def _must_be_admissible(self, name: str, arrays: dict[str, Tensor]) -> None:
        for path, values in arrays.items():
            if values.is_floating_point():
                assert bool((values.double().abs() <= LARGEST).all()), path
        if name == "perfed-ckt":
            assert arrays.keys() == {"soft_decisions"}
        if "soft_decisions" in arrays:
            rows = arrays["soft_decisions"]
            assert (rows.shape, rows.dtype) == ((P, N), torch.float32)
            assert bool((rows >= 0).all())
            assert all(abs(sum(row) - 1) <= TOLERANCE for row in rows.double().tolist())
        if "samples" in arrays:
            assert arrays["samples"].tolist() == SAMPLES
        if name == "fedavg":
            expected = flatten({"model": MODEL}) | {"samples": torch.tensor(SAMPLES)}
            assert arrays.keys() == expected.keys()
            for path, values in expected.items():
                assert (arrays[path].shape, arrays[path].dtype) == (values.shape, values.dtype)
        if name == "local":
            assert not arrays
