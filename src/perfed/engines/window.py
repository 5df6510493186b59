"""The samples of the clients at work, where a population's are never all in memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from perfed.data import Federation


class Window:
    """Tables of samples and labels at a fixed place, refilled for each call: what engines have
    recorded looks at the same place. They are made anew only to have more room."""

    def __init__(self, federation: Federation, device: torch.device) -> None:
        assert federation.distant is not None
        self._data = federation.distant
        self._device = device
        self._inputs = federation.inputs
        self._samples = federation.samples
        self._first: dict[int, int] = {}
        """Where the samples of each client begin that are here."""
        self._make(0)

    def bring(self, clients: Iterable[int]) -> None:
        """Have the samples of these clients here, and where one is missing no others."""
        wanted = list(clients)
        if all(client in self._first for client in wanted):
            return
        sizes = self._data.sizes[wanted]
        total = int(sizes.sum())
        if total > len(self.y):
            self._make(max(total, 2 * len(self.y)))
        self._first = dict(zip(wanted, (np.cumsum(sizes) - sizes).tolist(), strict=True))
        for client, first in self._first.items():
            x, y = self._data.client(client)
            self.x[first : first + len(y)] = torch.from_numpy(x)
            self.y[first : first + len(y)] = torch.from_numpy(y)

    def first(self, client: int) -> int:
        return self._first[client]

    def _make(self, room: int) -> None:
        nothing = np.zeros((room, *self._inputs.shape), self._samples.x.dtype)
        self.x = self._inputs.table(nothing, self._samples.pixels, self._device)
        self.y: Tensor = torch.zeros(room, dtype=torch.int64, device=self._device)
