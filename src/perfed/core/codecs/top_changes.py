"""Of weights that a client was sent and sends back: the changes that are largest.

The client keeps what it did not send, and adds it to its next change (error feedback), so nothing
is lost for good. The server adds the changes to what it sent. Only arrays that were sent to the
client under the same name are coded, so the server needs no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage, stages

GAPS = "|gaps"
FEWEST = 64
"""Numbers of an array that is coded."""


@stages.register("top-changes")
@dataclass(frozen=True)
class TopChanges(Stage):
    """Of weights, sends only the largest changes since the client received them, with error
    feedback: what is left out is added to the client's next change."""

    share: float = option(0.05, "changes that are sent, of all", gt=0, le=1)

    exact = False
    codes = True

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays, left = dict(message.arrays), dict(state.get("left", {}))
        for path, values in message.arrays.items():
            before = _sent_to_client(path, at)
            if not _is_coded(path, values, before):
                continue
            assert before is not None
            change = (values - before).flatten()
            if path in left and left[path].shape == change.shape:
                change = change + left[path].to(change)
            count = math.ceil(self.share * change.numel())
            where = change.abs().topk(count).indices.sort().values
            arrays[path] = change[where]
            arrays[path + GAPS] = where.diff(prepend=where.new_zeros(1)).int()
            left[path] = change.index_fill(0, where, 0)
        return Message.from_arrays(arrays), {"left": left} if left else state

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        arrays = {path: t for path, t in message.arrays.items() if not path.endswith(GAPS)}
        for path, gaps in message.arrays.items():
            if path.endswith(GAPS):
                name = path.removesuffix(GAPS)
                arrays[name] = _added(_sent_to_client(name, at), arrays[name], gaps)
        return Message.from_arrays(arrays), state


def _sent_to_client(path: str, at: At) -> Tensor | None:
    return at.known.received.arrays.get(path) if at.known is not None else None


def _is_coded(path: str, values: Tensor, before: Tensor | None) -> bool:
    if before is None or before.shape != values.shape or values.numel() < FEWEST:
        return False
    is_statistic = "buffers" in path.split("/")[-2:][0]  # of BatchNorm: no sum of changes
    return values.is_floating_point() and not is_statistic


def _added(before: Tensor | None, change: Tensor, gaps: Tensor) -> Tensor:
    if before is None:
        raise Refused("changes of what was not sent to the client")
    if gaps.dtype != torch.int32 or gaps.ndim != 1 or gaps.shape != change.shape:
        raise Refused("each change must have its place")
    if len(gaps) > before.numel() or not change.is_floating_point():
        raise Refused(f"{len(gaps)} changes of {before.numel()} numbers")
    where = gaps.long().cumsum(0)
    if len(gaps) and (
        int(gaps.min()) < 0 or bool((gaps[1:] == 0).any()) or int(where[-1]) >= before.numel()
    ):
        raise Refused(f"places must rise, and be below {before.numel()}")
    found = before.flatten().to(change.device, copy=True)
    found[where] += change.to(found.dtype)
    return found.view(before.shape)
