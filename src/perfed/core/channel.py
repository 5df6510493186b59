"""Counting: everything that crosses is measured here.

Two counts, both per direction:

* ``parameters``, the paper's, of messages as the algorithm wrote them: every uplink array counts,
  and on the downlink every *distinct* array of the round counts once, however many clients receive
  it (a broadcast). Scalars (sample counts, a cluster's index), unless a model learns them, and
  BatchNorm's running statistics are not parameters.
* ``bytes``, as sent: every message to every recipient, after all stages of the wire
  (:mod:`perfed.core.wire`), in its encoding (:mod:`perfed.core.tensorfile`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import Tensor

from perfed.core.message import Message
from perfed.core.tensorfile import encoded_size
from perfed.core.tree import identity


@dataclass
class Traffic:
    """What crossed so far."""

    up_parameters: int = 0
    down_parameters: int = 0
    up_bytes: int = 0
    down_bytes: int = 0

    @property
    def parameters(self) -> int:
        return self.up_parameters + self.down_parameters

    @property
    def bytes(self) -> int:
        return self.up_bytes + self.down_bytes


class Channel:
    """Counts the messages between the server and its clients.

    ``sent`` is what the stages of the wire made of ``messages``; without any, the same.
    """

    def __init__(self, total: Traffic | None = None) -> None:
        self.total = total or Traffic()

    def down(
        self, messages: Mapping[int, Message], sent: Mapping[int, Message] | None = None
    ) -> None:
        """Server to clients."""
        distinct: dict[Hashable, Tensor] = {}  # what is one tensor is broadcast as one thing
        for message in messages.values():
            distinct |= {identity(tensor): tensor for tensor in _parameter_arrays(message)}
        self.total.down_parameters += sum(tensor.numel() for tensor in distinct.values())
        self.total.down_bytes += _bytes(messages if sent is None else sent)

    def up(
        self, messages: Mapping[int, Message], sent: Mapping[int, Message] | None = None
    ) -> None:
        """Clients to server."""
        for message in messages.values():
            self.total.up_parameters += sum(t.numel() for t in _parameter_arrays(message))
        self.total.up_bytes += _bytes(messages if sent is None else sent)


def _bytes(messages: Mapping[int, Message]) -> int:
    return sum(encoded_size(message.arrays) for message in messages.values())


def _parameter_arrays(message: Message) -> list[Tensor]:
    return [tensor for path, tensor in message.arrays.items() if _counts(path, tensor)]


def _counts(path: str, tensor: Tensor) -> bool:
    """Whether these are parameters; a model's may be a single number."""
    level = ["", *path.split("/")][-2]  # of a model's tensors: the part of its weights
    return level == "params" or (tensor.ndim > 0 and level not in ("buffers", "public_buffers"))
