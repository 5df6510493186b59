"""Clients send what has changed since their last message; the server adds it up.

Both ends keep the last message. An answer that was lost is found out by the number of those before
it, and the next one is then refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage, stages


@stages.register("difference")
@dataclass(frozen=True)
class Difference(Stage):
    exact = False

    def send(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        last, number = _last(state)
        changed = {name: _minus(t, last.get(name)) for name, t in message.arrays.items()}
        sum_ = {name: _plus(t, last.get(name)) for name, t in changed.items()}
        return Message(number=number, changed=_tree(changed)), _state(sum_, number)

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        last, number = _last(state)
        if int(message["number"]) != number:
            raise Refused(f"builds on {int(message['number'])} messages, {number} are known")
        changed = message["changed"]
        sum_ = {name: _plus(t, last.get(name)) for name, t in changed.items()}
        return Message.from_arrays(sum_), _state(sum_, number)


def _last(state: Tree) -> tuple[dict[str, Tensor], int]:
    return state.get("last", {}), int(state.get("number", 0))


def _state(last: dict[str, Tensor], number: int) -> Tree:
    return {"last": last, "number": torch.tensor(number + 1)}


def _tree(arrays: dict[str, Tensor]) -> Tree:
    return dict(arrays)  # one level, whatever the names: escaped on the way


def _minus(new: Tensor, old: Tensor | None) -> Tensor:
    fits = old is not None and old.shape == new.shape and new.is_floating_point()
    return new - old if fits else new  # type: ignore[operator]


def _plus(change: Tensor, old: Tensor | None) -> Tensor:
    fits = old is not None and old.shape == change.shape and change.is_floating_point()
    return change + old if fits else change  # type: ignore[operator]
