"""Pictures: the bytes that are kept, and the numbers that networks get.

A table of samples keeps pictures as the bytes they came in, a quarter of the memory. Bytes become
numbers from −1 to 1 where some of them are looked at, everywhere by the same three operations in
float32. So it makes no difference, to the bit, where and when that is.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

HALF = 127.5  # of the largest byte


def scaled(x: np.ndarray) -> np.ndarray:
    """As float32; bytes from −1 to 1."""
    # Copied only where it must be; what is read from a mapped file is read now.
    result = x.astype(np.float32, copy=not x.flags.writeable)
    if x.dtype == np.uint8:
        result /= HALF
        result -= 1
    return result


def numbers(x: Tensor) -> Tensor:
    """Rows of a table as networks get them. In a table, bytes are pixels; all else stays."""
    if x.dtype != torch.uint8:
        return x
    result = x.to(torch.float32)
    # By a tensor: to divide by a plain number, a GPU multiplies with its rounded reciprocal.
    result.div_(result.new_full((), HALF)).sub_(1)
    return result.to(torch.get_default_dtype())


def samples_at(table: Tensor, where: Tensor) -> Tensor:
    """``table[where]`` as networks get it. On a CPU plain indexing would copy number by number, and
    not sample by sample."""
    if table.is_cuda:
        return numbers(table[where])
    rows = table.index_select(0, where.flatten())
    return numbers(rows.view(*where.shape, *table.shape[1:]))


def joined(tables: list[Tensor]) -> Tensor:
    """One table after another. Where only some are bytes, all become numbers."""
    if len({table.dtype for table in tables}) > 1:
        tables = [numbers(table) for table in tables]
    return tables[0] if len(tables) == 1 else torch.cat(tables)
