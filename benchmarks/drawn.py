"""Figures of the documentation, each with a stamp that says which numbers it shows.

A picture's bytes differ with the version of matplotlib. So what is compared is the stamp: a digest
of the points and words that are drawn. A picture of which only the look is to change is deleted
first.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from perfed.core.method_numbers import USUAL
from perfed.report.theme import COLOURS

STAMP = "Drawn"  # a text chunk of the PNG file
COLOUR_OF = {name: COLOURS[number] for number, name in enumerate(USUAL)}
"""As on the pages of runs and studies."""


def stamp_of(figure: Figure) -> str:
    """The same wherever the same numbers are drawn."""
    said = []
    for axis in figure.axes:
        for line in axis.lines:
            said.append(_points(line.get_xydata()))
        for collection in axis.collections:
            said.append(_points(collection.get_offsets()))
        for patch in axis.patches:
            place = patch.get_patch_transform()  # in the units of the axes, not of the picture
            said.append(_points(place.transform(patch.get_path().vertices)))
        words = [*axis.texts, axis.title, axis.xaxis.label, axis.yaxis.label]
        said += [text.get_text() for text in words]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def _points(values: object) -> str:
    return " ".join(f"{value:.6g}" for value in np.asarray(values, dtype=float).ravel())


def stamp_in(path: Path) -> str | None:
    if not path.is_file():
        return None
    found = re.search(rb"tEXt" + STAMP.encode() + rb"\0([0-9a-f]{64})", path.read_bytes())
    return found[1].decode() if found else None


def draw(path: Path, figure: Figure) -> None:
    figure.savefig(path, dpi=130, metadata={STAMP: stamp_of(figure), "Software": None})
