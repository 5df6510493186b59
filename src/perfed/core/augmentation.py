"""Random changes of images while training: mirrored, or moved by a few pixels.

What happens to a sample is one number, its *code*, drawn from a stream of the client's own. So
every engine makes the same images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

MARGIN = 4
"""Pixels by which an image moves at most; what comes in from outside is zero."""
PLACES = 2 * MARGIN + 1
CODES = 2 * PLACES * PLACES
"""Codes are drawn uniformly from 0 … CODES-1: a flip, and a place in each direction."""


def augmented(x: Tensor, codes: Tensor, how: Sequence[str]) -> Tensor:
    """Images (…, C, H, W), changed as their codes (…) say; ``how`` has 'flip', 'crop' or both."""
    if "flip" in how:
        mirrored = (codes % 2 == 1)[..., None, None, None]
        x = torch.where(mirrored, x.flip(-1), x)
    if "crop" in how:
        x = _moved(x, codes // 2 % PLACES, codes // (2 * PLACES))
    return x


def _moved(x: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """The part of each padded image that begins at row ``down`` and column ``right``."""
    height, width = x.shape[-2:]
    padded = pad(x, (MARGIN,) * 4)
    rows = torch.arange(height, device=x.device) + down[..., None]
    columns = torch.arange(width, device=x.device) + right[..., None]
    tall = padded.gather(-2, rows[..., None, :, None].expand(*x.shape[:-1], padded.shape[-1]))
    return tall.gather(-1, columns[..., None, None, :].expand(x.shape))
