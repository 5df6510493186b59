"""Whether a public set looks like the private data it is to teach about.

Knowledge is transferred on the public set; where it looks like nothing a client has seen, models
say little about it. Nothing here stops a run unless it cannot work: shapes that differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from perfed.core.errors import ConfigError, shape_text
from perfed.core.notices import say_once

LOOKED_AT = 1000  # samples of each
FAR = 2.0  # deviations between the means
WIDE = 3.0  # times the deviation


def check_alike(
    private: np.ndarray,
    public: np.ndarray,
    private_sizes: Sequence[str] = (),
    public_sizes: Sequence[str] = (),
) -> None:
    """A line for each thing that looks odd; an error for shapes that differ."""
    _check_shapes(private.shape[1:], public.shape[1:])
    for line in oddities(private, public, private_sizes, public_sizes):
        say_once(line)


def oddities(
    private: np.ndarray,
    public: np.ndarray,
    private_sizes: Sequence[str] = (),
    public_sizes: Sequence[str] = (),
) -> Iterator[str]:
    if not len(public) or private.dtype.kind == "i":  # tokens: which is larger means nothing
        return
    if private_sizes and public_sizes and set(private_sizes) != set(public_sizes):
        yield (
            f"public images were {_few(public_sizes)} before they were resized, private ones "
            f"{_few(private_sizes)}: details may look different"
        )
    private, public = some(private), some(public)
    if _is_grey(public) != _is_grey(private):
        which = ("grey", "in colour") if _is_grey(public) else ("in colour", "grey")
        yield f"public images are all {which[0]}, private ones {which[1]}"
    centre, spread = float(private.mean()), float(private.std()) or 1.0
    ratio = (float(public.std()) or 1e-12) / spread
    if abs(float(public.mean()) - centre) > FAR * spread or not 1 / WIDE <= ratio <= WIDE:
        yield (
            f"public values look unlike private ones: {_range(public)} against {_range(private)}; "
            "are they in the same units?"
        )


def _check_shapes(private: tuple[int, ...], public: tuple[int, ...]) -> None:
    if private == public:
        return
    remedy = "they must be alike"
    if len(private) == len(public) == 3:
        remedies = []
        if private[1:] != public[1:]:
            remedies.append(f"size: [{private[1]}, {private[2]}]")
        if private[0] != public[0] and private[0] in (1, 3):
            remedies.append(f"colours: {'grey' if private[0] == 1 else 'rgb'}")
        remedy = f"for image files, set data.public {{{', '.join(remedies)}}}"
    raise ConfigError(
        f"public samples are {shape_text(public)}, private ones {shape_text(private)}: {remedy}",
        "data.public",
    )


def some(x: np.ndarray) -> np.ndarray:
    """As many as are looked at; of these, all."""
    return x[:: max(1, len(x) // LOOKED_AT)][:LOOKED_AT]


def _is_grey(x: np.ndarray) -> bool:
    """Three channels that all say the same."""
    if x.ndim != 4 or x.shape[1] != 3:
        return False
    return bool((x[:, 0] == x[:, 1]).all() and (x[:, 1] == x[:, 2]).all())


def _range(x: np.ndarray) -> str:
    return f"{x.min():.3g} … {x.max():.3g} (mean {x.mean():.3g})"


def _few(sizes: Sequence[str]) -> str:
    return ", ".join(sizes[:2]) + (f" and {len(sizes) - 2} other sizes" if len(sizes) > 2 else "")
