"""Codes: what a link of codecs makes of any bytes is admissible, and no larger than declared."""

from __future__ import annotations

import torch

from perfed.core import tensorfile
from perfed.core.admission import most_bytes, refusals
from perfed.core.algorithm import algorithms
from perfed.core.declaration import Known
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.tree import Tree
from perfed.core.wire import Link, stages
from tests.fuzz.messages import MODEL, SAMPLES, N, P
from tests.fuzz.target import Target
from tests.fuzz.tensor_files import TensorFiles, with_length, with_zero

WIDE = torch.linspace(0, 1, 70)
LINKS: tuple[tuple[str, list[object]], ...] = (
    ("perfed-kin", [{"name": "probability-bits", "bits": 4}, "number-bits"]),
    ("perfed-kin", ["probability-bits", "cached"]),
    ("perfed-ckt", [{"name": "top-probabilities", "number": 1}]),
    ("fedavg", ["top-changes"]),
    ("perfed-ckt", ["probability-bits", "deflate"]),
    ("perfed-kin", [{"name": "probability-bits", "bits": 2}, "cached"]),
    ("perfed-kin", [{"name": "probability-bits", "bits": 3}, "cached", "number-bits", "deflate"]),
)


class Codes(Target):
    """The first byte is the link; the rest, a tensor file as in ``TensorFiles``."""

    tokens = (
        *TensorFiles.tokens,
        b"|range",
        b"|which",
        b"|numbers",
        b"|levels",
        b"|terms",
        b"|form",
        b"|gaps",
        b"soft_decisions",
        b'"U8"',
        b'"I32"',
    )

    def __init__(self, folder: object = None) -> None:
        self.links = [
            (Link(tuple(map(stages.build, wire)), 1), algorithms.build(name).messages().up)
            for name, wire in LINKS
        ]
        received = Message(model=MODEL._replace(params={**MODEL.params, "wide": WIDE}))
        self.known = Known({"P": P, "N": N}, SAMPLES, lambda _: MODEL, lambda _: "head", received)
        self.states: list[Tree] = [{}] * len(LINKS)
        sent = [self._sent(number) for number in range(len(LINKS))]  # so that rows are cached
        for number, message in enumerate(sent):
            link, declared = self.links[number]
            self.states[number] = link.receive(message, 0, 0, "up", {}, declared, self.known)[1]

    def _sent(self, number: int, round: int = 0) -> Message:
        soft = torch.eye(N).repeat(P // N, 1)
        model = MODEL._replace(params={**MODEL.params, "wide": WIDE + 1})
        contents = {
            "perfed-kin": {"soft_decisions": soft, "samples": SAMPLES, "gains": torch.zeros(3, 4)},
            "perfed-ckt": {"soft_decisions": soft},
            "fedavg": {"model": model, "samples": SAMPLES},
        }
        link, declared = self.links[number]
        message = Message(**contents[LINKS[number][0]])
        state: Tree = {}
        for step in range(round + 1):
            sent, state = link.send(message, 0, step, "up", state, declared, self.known)
        return sent

    def seeds(self) -> list[bytes]:
        return [
            bytes([number]) + with_zero(tensorfile.encode(self._sent(number, 1).arrays))
            for number in range(len(LINKS))
        ]

    def read(self, data: bytes) -> None:
        number = data[0] % len(LINKS) if data else 0
        try:
            arrays, _ = tensorfile.decode(with_length(data[1:]), tensorfile.MESSAGE)
        except tensorfile.MALFORMED as error:
            raise Refused("no message") from error
        link, declared = self.links[number]
        before, state = len(data), self.states[number]
        message, _ = link.receive(
            Message.from_arrays(arrays), 0, 1, "up", state, declared, self.known
        )
        size = sum(tensor.nbytes for tensor in message.arrays.values())
        assert size <= 40 * before + most_bytes(declared, self.known), size
        for reason in refusals({0: message}, declared, lambda _: self.known).values():
            if "wide" not in reason:  # which the model that is declared does not have
                raise Refused(reason)
