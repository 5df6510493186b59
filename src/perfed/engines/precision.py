"""In which numbers networks compute. Weights, losses and updates stay in float32 (or float64)."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from perfed.core.errors import ConfigError


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


ISA = "ONEDNN_MAX_CPU_ISA"
"""The variable that tells PyTorch's CPU library which instructions it may use."""
WITHOUT_TILES = "AVX512_CORE_BF16"


@functools.cache
def bf16_crashes_here() -> bool:
    """Whether a matrix product in bf16 kills the process: some virtual machines announce matrix
    instructions that they do not have. Tried in a process of its own."""
    product = "import torch; a = torch.ones(4, 64, 64, dtype=torch.bfloat16); torch.bmm(a, a)"
    tried = subprocess.run([sys.executable, "-c", product], capture_output=True, check=False)
    return tried.returncode < 0  # killed by a signal


def check_bf16() -> None:
    """Raise where a CPU cannot compute in bf16, before it is asked to."""
    if bf16_crashes_here():
        raise ConfigError(
            "this machine announces matrix instructions it does not have, and bf16 would crash: "
            f"set {ISA}={WITHOUT_TILES} before the start, or use float32",
            "--precision",
        )


FLOAT32 = Precision("float32", "as it is written")
PRECISIONS = {
    precision.name: precision
    for precision in (
        FLOAT32,
        Precision("tf32", "matrix products in tf32, on a GPU that has it"),
        Precision("bf16", "networks in bfloat16; weights and their updates stay in float32"),
    )
}
