"""Messages: the only thing that passes between server and client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from perfed.core.tree import Weights, escaped, flatten, unflatten


class Message(Mapping[str, Any]):
    """Named arrays and small scalars.

    Written ``Message(soft_decisions=…)`` or ``Message(model=weights, samples=12)``; read back as
    ``message["soft_decisions"]``. Numbers become 0-dimensional tensors. ``arrays`` has every
    tensor by its flat name, which is what travels.
    """

    def __init__(self, **content: Tensor | Weights | Mapping[str, Any] | int | float) -> None:
        tensors = {
            name: torch.tensor(value) if isinstance(value, int | float) else value
            for name, value in content.items()
        }
        self.arrays: dict[str, Tensor] = {k: t.detach() for k, t in flatten(tensors).items()}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Tensor]) -> Message:
        message = cls()
        message.arrays = dict(arrays)
        return message

    def __getitem__(self, name: str) -> Any:
        level = escaped(name)
        if level in self.arrays:
            return self.arrays[level]
        inside = {
            path: tensor for path, tensor in self.arrays.items() if path.startswith(f"{level}/")
        }
        if not inside:
            raise KeyError(name)
        return unflatten(inside)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(unquote(path.partition("/")[0]) for path in self.arrays))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}{list(t.shape)}" for name, t in self.arrays.items())
        return f"Message({shapes})"
