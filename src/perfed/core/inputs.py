"""What one sample is: its shape, and whether it is numbers or tokens.

*Numbers* are measurements and pixels: floating point in the network's precision. *Tokens* are whole
numbers 0, 1, 2, … that stand for words or letters: they stay integers from the file to the network,
nothing scales them, and no precision rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from perfed.core.errors import shape_text

Kind = Literal["numbers", "tokens"]


@dataclass(frozen=True)
class Tokens:
    """That samples are tokens, and how many different ones there are."""

    count: int
    """The vocabulary: tokens are 0 … count-1."""
    declared: bool = True
    """Whether the data says so. If not, whole numbers were found, which may be measurements."""


@dataclass(frozen=True)
class Inputs:
    shape: tuple[int, ...]
    tokens: Tokens | None = None

    @classmethod
    def of(cls, value: Inputs | Sequence[int]) -> Inputs:
        """A shape alone is that of numbers."""
        return value if isinstance(value, Inputs) else cls(tuple(value))

    @classmethod
    def with_vocabulary(cls, shape: Sequence[int], vocabulary: int) -> Inputs:
        """Of tokens; with a vocabulary of 0, of numbers."""
        return cls(tuple(shape), Tokens(vocabulary) if vocabulary else None)

    @property
    def kind(self) -> Kind:
        return "tokens" if self.tokens else "numbers"

    @property
    def vocabulary(self) -> int:
        """How many different tokens there are; 0 of numbers."""
        return self.tokens.count if self.tokens else 0

    def tensor(self, values: Any, device: torch.device | None = None) -> Tensor:
        """Samples as networks get them."""
        dtype = torch.int64 if self.tokens else torch.get_default_dtype()
        return torch.as_tensor(values, dtype=dtype, device=device)

    def table(
        self, values: np.ndarray, pixels: bool = False, device: torch.device | None = None
    ) -> Tensor:
        """Samples as engines hold them, to be read by :mod:`perfed.core.pixels`. With ``pixels``
        bytes are pixels, and stay bytes."""
        if pixels and values.dtype == np.uint8:
            return torch.as_tensor(np.ascontiguousarray(values), device=device)
        return self.tensor(values, device)

    def zeros(self, count: int, device: torch.device | None = None) -> Tensor:
        """Samples to try a network with."""
        return self.tensor(torch.zeros(count, *self.shape), device)

    def random(self, count: int) -> Tensor:
        """The same, drawn from torch's generator."""
        if self.tokens:
            return torch.randint(self.tokens.count, (count, *self.shape))
        return torch.rand(count, *self.shape)

    def __str__(self) -> str:
        shape = shape_text(self.shape)
        return f"{shape} tokens of {self.tokens.count:,}" if self.tokens else shape


def precision_of(x: Tensor) -> torch.dtype:
    """The type of what is made of a network's outputs for samples ``x``: that of numbers."""
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()
