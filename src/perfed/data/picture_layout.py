"""Which dimension of an array of pictures is which. Networks take channels × height × width."""

from __future__ import annotations

from typing import Literal

import numpy as np

from perfed.core.errors import DataError, shape_text
from perfed.core.notices import say_once

Layout = Literal["auto", "CHW", "HWC", "HW", "none"]
LAYOUT_HELP = (
    "dimensions of a sample: CHW, HWC or HW for pictures, none for other data; auto: bytes are "
    "pictures, and so are samples with a last dimension of 1, 3 or 4 where the first is larger"
)
CHANNELS = (1, 3, 4)  # grey, colour, colour with opacity


def channels_first(x: np.ndarray, layout: Layout, what: str) -> np.ndarray:
    """``x`` as networks take it; other data than pictures as it is."""
    found = _found(x) if layout == "auto" else layout
    if found == "none":
        return x
    if x.ndim != len(found) + 1:
        raise DataError(
            f"samples of {what} are {shape_text(x.shape[1:])}: 'layout: {found}' is of "
            f"{len(found)} dimensions"
        )
    if found == "HW":
        return x[:, None]
    if found == "HWC":
        if layout == "auto":
            say_once(
                f"samples of {what}, {shape_text(x.shape[1:])}, are taken for pictures of "
                "height×width×channels; if they are not, set data.layout: CHW"
            )
        return np.ascontiguousarray(np.moveaxis(x, -1, 1))
    return x


def _found(x: np.ndarray) -> Layout:
    if x.ndim == 3 and x.dtype == np.uint8:
        return "HW"
    if x.ndim == 4 and x.shape[-1] in CHANNELS and x.shape[1] > max(CHANNELS):
        return "HWC"
    return "none"
