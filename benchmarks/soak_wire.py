"""A wire on which things go wrong, for ``soak.py``: messages are lost, spoilt or unreadable."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree
from perfed.core.wire import At, Stage


@dataclass(frozen=True)
class Trouble(Stage):
    """Of each client's messages a share, by addressed random numbers, does not arrive as sent."""

    lost: float = option(0.1, "how many do not arrive")
    spoilt: float = option(0.15, "how many arrive as something that is not admitted")

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        counted = {"seen": state.get("seen", torch.tensor(0)) + 1}  # it must outlive a kill
        draw = at.random()
        fate = draw.uniform()
        if at.round < 0 or fate >= self.lost + self.spoilt:
            return message, counted
        if fate < self.lost:
            raise Refused("is not there")
        (name, values), kind = next(iter(message.arrays.items())), draw.integers(5)
        if kind == 0:
            raise ValueError("cannot be read")
        lies = {
            1: {name: values[:1]},
            2: {name: torch.full_like(values, float("nan"))},
            3: {name: values * 1000},
            4: {name: values, "more": torch.zeros(1000)},
        }
        return Message.from_arrays(lies[int(kind)]), counted
