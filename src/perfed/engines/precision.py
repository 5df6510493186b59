"""In which numbers networks compute. Weights, losses and updates stay in float32 (or float64)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Precision:
    name: str
    about: str

    @contextlib.contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Inside, networks compute in this precision."""
        matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
        before = matmul.allow_tf32, convolution.allow_tf32
        matmul.allow_tf32 = convolution.allow_tf32 = self.name == "tf32"
        # Without its cache, which would keep the weights of the first step for all others.
        bf16 = torch.autocast(
            device.type, torch.bfloat16, enabled=self.name == "bf16", cache_enabled=False
        )
        try:
            with bf16:
                yield
        finally:
            matmul.allow_tf32, convolution.allow_tf32 = before


FLOAT32 = Precision("float32", "as it is written")
PRECISIONS = {
    precision.name: precision
    for precision in (
        FLOAT32,
        Precision("tf32", "matrix products in tf32, on a GPU that has it"),
        Precision("bf16", "networks in bfloat16; weights and their updates stay in float32"),
    )
}
