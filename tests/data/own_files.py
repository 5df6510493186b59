"""A user's own files, made small."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def picture(
    seed: int, shade: int, size: tuple[int, int] = (8, 8), grey: bool = False
) -> np.ndarray:
    """Noise around a shade, height × width × RGB."""
    random = np.random.default_rng(seed)
    channels = 1 if grey else 3
    noise = random.integers(0, 100, (*size, channels), dtype=np.uint8) + np.uint8(shade)
    return np.repeat(noise, 3, axis=2) if grey else noise


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def photos(
    root: Path,
    classes: Sequence[str] = ("cat", "dog", "emu"),
    each: int = 20,
    size: tuple[int, int] = (8, 8),
    grey: bool = False,
    first_seed: int = 0,
) -> Path:
    """A folder of PNG files for each class, darker for the first classes."""
    for label, name in enumerate(classes):
        for number in range(each):
            pixels = picture(first_seed + 1000 * label + number, 60 * label, size, grey)
            save(root / name / f"{number:03d}.png", pixels)
    return root


def table(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


HEADER = ("age", "income", "colour", "kind")


def people(count: int, seed: int = 0) -> list[list[object]]:
    """Rows whose kind shows in their age and income."""
    random = np.random.default_rng(seed)
    rows: list[list[object]] = []
    for _ in range(count):
        kind = int(random.integers(3))
        age, income = random.normal(30 + 20 * kind, 3), random.normal(1000 * kind, 200)
        colour = ("red", "green")[int(random.integers(2))]
        rows.append([round(age, 1), round(income, 2), colour, ("low", "mid", "top")[kind]])
    return rows
