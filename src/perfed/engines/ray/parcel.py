"""What goes to a worker and comes back: any structure of ours, its tensors apart.

Tensors travel as NumPy arrays, which Ray moves without copying them into a pickle. What is one
tensor for many clients (a broadcast model) is one array here, and one tensor where it arrives.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perfed.core.tree import identity


@dataclass(frozen=True)
class Parcel:
    structure: bytes
    arrays: list[np.ndarray]
    dtypes: dict[int, torch.dtype]
    """Of those arrays that NumPy has no type for; they are here by their bits."""


def pack(value: Any) -> Parcel:
    buffer = io.BytesIO()
    packer = _Packer(buffer)
    packer.dump(value)
    return Parcel(buffer.getvalue(), packer.arrays, packer.dtypes)


def unpack(parcel: Parcel, device: torch.device) -> Any:
    return _Unpacker(parcel, device).load()


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.arrays: list[np.ndarray] = []
        self.dtypes: dict[int, torch.dtype] = {}
        self._places: dict[Any, int] = {}
        self._alive: list[Tensor] = []  # while packing, no other tensor may get its memory

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        key = identity(value)
        if key not in self._places:
            self._places[key] = len(self.arrays)
            self._alive.append(value)
            tensor = value.detach().cpu()
            if tensor.dtype == torch.bfloat16:
                self.dtypes[len(self.arrays)] = tensor.dtype
                tensor = tensor.view(torch.int16)
            self.arrays.append(tensor.numpy())
        return self._places[key]


class _Unpacker(pickle.Unpickler):
    def __init__(self, parcel: Parcel, device: torch.device) -> None:
        super().__init__(io.BytesIO(parcel.structure))
        self._parcel = parcel
        self._device = device
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, place: int) -> Tensor:
        if place not in self._tensors:
            # A copy: Ray's memory is shared and read only.
            tensor = torch.from_numpy(np.array(self._parcel.arrays[place]))
            if place in self._parcel.dtypes:
                tensor = tensor.view(self._parcel.dtypes[place])
            self._tensors[place] = tensor.to(self._device)
        return self._tensors[place]
