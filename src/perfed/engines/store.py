"""What clients keep, in memory, or on disk beyond a limit.

Only clients that have been selected are here: a federation of any size costs what these cost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import torch

from perfed.core import tensorfile
from perfed.core.tree import flatten, unflatten
from perfed.engines.base import ClientRecord

PREFIX = "store-"


class ClientStore(MutableMapping[int, ClientRecord]):
    """Records by client. Those used longest ago leave memory once ``limit`` bytes are full."""

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self._device = device
        self.limit = limit
        self.in_memory: dict[int, ClientRecord] = {}  # the one used longest ago comes first
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._on_disk: set[int] = set()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.folder: Path | None = None
        """Where the files' folder is made, before the first one is written."""

    def __getitem__(self, client: int) -> ClientRecord:
        if client in self._on_disk:
            self[client] = self._read(client)
        record = self.in_memory[client]
        if self.limit is not None:  # it is now the one used last
            self.in_memory[client] = self.in_memory.pop(client)
        return record

    def __setitem__(self, client: int, record: ClientRecord) -> None:
        if client in self:
            del self[client]
        self.in_memory[client] = record
        if self.limit is None:
            return
        self._sizes[client] = _size(record)
        self._bytes += self._sizes[client]
        while self._bytes > self.limit and len(self.in_memory) > 1:
            self._spill(next(iter(self.in_memory)))

    def __delitem__(self, client: int) -> None:
        if client in self._on_disk:
            self._on_disk.remove(client)
            self._file(client).unlink()
        else:
            del self.in_memory[client]
            self._bytes -= self._sizes.pop(client, 0)

    def __contains__(self, client: object) -> bool:
        return client in self.in_memory or client in self._on_disk

    def __iter__(self) -> Iterator[int]:
        return iter(sorted([*self.in_memory, *self._on_disk]))

    def __len__(self) -> int:
        return len(self.in_memory) + len(self._on_disk)

    def close(self) -> None:
        if self._directory is not None:
            self._directory.cleanup()

    def _spill(self, client: int) -> None:
        record = self.in_memory[client]
        content = tensorfile.encode(flatten(record.tree()))
        self._file(client).write_bytes(content)
        del self[client]
        self._on_disk.add(client)

    def _read(self, client: int) -> ClientRecord:
        tensors = tensorfile.load(self._file(client))
        tree = unflatten({name: tensor.to(self._device) for name, tensor in tensors.items()})
        return ClientRecord.from_tree(tree)

    def _file(self, client: int) -> Path:
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix=PREFIX, dir=self.folder)
        return Path(self._directory.name) / f"{client}.safetensors"


def _size(record: ClientRecord) -> int:
    tensors = flatten(record.tree()).values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
