"""Your own tables: CSV files with a label column.

A column of numbers is a feature, standardised unless told otherwise: by the mean and deviation of
the *training* rows of all clients, put together once it is known which they are
(:func:`perfed.data.federation.standardised`). Validation, test and public rows have no say in it.
In a real federation clients would have to tell two numbers for each column. A column of words is a
feature for each word, 0 or 1.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Literal

import numpy as np

from perfed.core.errors import ConfigError, DataError, did_you_mean, shape_text
from perfed.core.inputs import Tokens
from perfed.core.notices import say_once
from perfed.core.schema import option
from perfed.data.datasets import Unlabeled, datasets
from perfed.data.opening import open_file
from perfed.data.sources import (
    LARGEST,
    TOO_LARGE,
    Contents,
    Places,
    content_hash,
    named_labels,
)

MOST_WORDS = 1000  # in a column; more are names, and no categories
MANY_WORDS = 20  # from here on, words that mostly differ from row to row are spoken of
LONGEST_HEADER = 1 << 16
COMMA_NUMBER = re.compile(r"[+-]?\d+,\d+")


@dataclass(frozen=True)
class Sheet:
    """The cells of a CSV file, by column, and where a row stood."""

    path: Path
    columns: Mapping[str, list[str]]
    lines: Sequence[int]

    def __len__(self) -> int:
        return len(self.lines)

    def cell(self, row: int, column: str) -> str:
        return f"{self.path}, line {self.lines[row]}, column '{column}'"

    def column(self, name: str, why: str) -> list[str]:
        if name not in self.columns:
            hint = did_you_mean(name, self.columns)
            raise ConfigError(f"{self.path} has no column '{name}'{hint}", why)
        return self.columns[name]


@dataclass(frozen=True)
class Feature:
    """A column of numbers, or of the words that are known."""

    name: str
    words: tuple[str, ...] = ()

    def titles(self) -> list[str]:
        return [f"{self.name}={word}" for word in self.words] or [self.name]

    def values(self, sheet: Sheet) -> np.ndarray:
        """Rows × 1, or rows × words."""
        cells = sheet.column(self.name, "path")
        if not self.words:
            return numbers(sheet, self.name)[:, None]
        place = {word: number for number, word in enumerate(self.words)}
        return np.eye(len(self.words))[[place[cell] for cell in cells]]


@datasets.register("csv")
@dataclass(frozen=True)
class Csv(Places):
    """Your own table: a CSV file with a header, a row for each sample, and a label column.

    Columns of numbers are standardised by the training rows of all clients, and no others; columns
    of words become a feature for each word.
    """

    endings = (".csv",)

    path: str = option("", "the .csv file")
    target: str = option("label", "the label column: what is predicted, words or numbers")
    client: str = option("", "the column with the client of each row; needs partition: given")
    ignore: tuple[str, ...] = option((), "columns that are not used, such as an id")
    categories: tuple[str, ...] = option((), "columns of numbers that stand for categories")
    scale: Literal["standard", "none", "pixels"] = option(
        "standard",
        "columns of numbers: mean 0, deviation 1 over all clients' training rows; as they are; or "
        "pixels, 0 … 255, as numbers from −1 to 1",
    )
    shape: tuple[int, ...] = option(
        (),
        "columns are the pixels of a picture: channels, height and width, row by row; empty: a row "
        "of numbers",
        ge=1,
    )
    vocabulary: int = option(
        0,
        "columns are tokens, whole numbers from 0 to one less than this; 0: they are not",
        ge=0,
    )
    separator: str = option(",", "the character between two cells")

    def validate(self) -> None:
        if len(self.separator) != 1:
            raise ConfigError(f"{self.separator!r} is not one character", "separator")
        if self.by_client and self.client:
            raise ConfigError("files by client, so no column is needed", "client")
        if self.vocabulary and self.scale == "pixels":
            raise ConfigError("tokens are no pixels", "scale")

    def read(self, labeled: bool) -> Contents:
        """Words are numbered for all files at once, those of a public table among them."""
        sheets = self._sheets()
        own = list(sheets.values())
        public = self.public if labeled and isinstance(self.public, Csv) else None
        others = list(public._sheets().values()) if public else []
        features = self._features(own, others)
        if self.vocabulary:
            self._check_tokens(features, [*own, *others])
        x, public_x = (self._samples(features, some) if some else None for some in (own, others))
        assert x is not None
        titles = tuple(title for feature in features for title in feature.titles())
        plain = np.array([not feature.words for feature in features for _ in feature.titles()])
        y, names = self._labels(own) if labeled else (None, ())
        return Contents(
            x,
            y,
            names,
            self._client_ids(sheets) if labeled else None,
            public=public_x,
            columns=titles,
            unscaled=plain.reshape(x.shape[1:]) if self._standardises and plain.any() else None,
            tokens=Tokens(self.vocabulary) if self.vocabulary else None,
        )

    def _samples(self, features: Sequence[Feature], sheets: Sequence[Sheet]) -> np.ndarray:
        x = _encoded(features, sheets)
        if self.scale == "pixels":
            for feature, sheet in itertools.product(features, sheets):
                _check_pixels(feature, sheet)
            x = x.astype(np.uint8)
        if not self.shape:
            return x
        if x.shape[1] != math.prod(self.shape):
            raise DataError(
                f"{sheets[0].path} has {x.shape[1]} columns beside the label, a picture of "
                f"{shape_text(self.shape)} has {math.prod(self.shape)}"
            )
        return x.reshape(-1, *self.shape)

    @property
    def _standardises(self) -> bool:
        return self.scale == "standard" and not self.vocabulary

    def _check_tokens(self, features: Sequence[Feature], sheets: Sequence[Sheet]) -> None:
        for feature, sheet in itertools.product(features, sheets):
            if feature.words:
                raise DataError(f"{sheet.cell(0, feature.name)} is no token: a whole number")
            values = feature.values(sheet)[:, 0]
            wrong = (values != np.floor(values)) | (values < 0) | (values >= self.vocabulary)
            if wrong.any():
                row = int(wrong.argmax())
                raise DataError(
                    f"{sheet.cell(row, feature.name)}: {sheet.columns[feature.name][row]} is no "
                    f"token: with vocabulary {self.vocabulary} they are 0 … {self.vocabulary - 1}"
                )

    def _sheets(self) -> dict[str, Sheet]:
        """By client, where there is a file for each."""
        places = self.places()
        return {name: read_sheet(place, self.separator) for name, place in places.items()}

    def _public(self, contents: Contents, seed: int) -> Unlabeled:
        if not isinstance(self.public, Csv):
            return super()._public(contents, seed)
        assert contents.public is not None
        index = self.public._drawn_public(len(contents.public), seed)
        origin = {"hash": content_hash(contents.public)}
        return Unlabeled(contents.public[index], index, origin, tokens=contents.tokens)

    def _features(self, own: Sequence[Sheet], others: Sequence[Sheet]) -> list[Feature]:
        first = own[0]
        for name in (*self.ignore, *self.categories):
            first.column(name, "ignore" if name in self.ignore else "categories")
        aside = {self.target, self.client, *self.ignore}
        names = [name for name in first.columns if name not in aside]
        if not names:
            raise DataError(f"{first.path} has no column beside the label")
        return [self._feature(name, [*own, *others]) for name in names]

    def _feature(self, name: str, sheets: Sequence[Sheet]) -> Feature:
        """Of numbers, if any cell is one: the cells that are none are then found, and named."""
        columns = [sheet.column(name, "path") for sheet in sheets]
        if name not in self.categories and any(
            is_number(cell) for cells in columns for cell in cells
        ):
            return Feature(name)
        words: set[str] = set()
        for sheet in sheets:
            cells = sheet.column(name, "path")
            if "" in cells:
                raise _empty(sheet, name)
            words.update(cells)
        has_commas = self.separator != "," and all(map(COMMA_NUMBER.fullmatch, words))
        if has_commas and name not in self.categories:
            cell = f"{sheets[0].cell(0, name)}: {columns[0][0]}"
            raise DataError(
                f"{cell} has a decimal comma: write numbers with a point, as in 0.5, or list the "
                "column under 'categories'"
            )
        if len(words) > MOST_WORDS:
            raise DataError(
                f"column '{name}' of {sheets[0].path} has {len(words):,} different words: "
                "if it names its rows, list it under 'ignore'"
            )
        rows = sum(map(len, columns))
        if len(words) > max(MANY_WORDS, rows / 2):
            say_once(
                f"column '{name}' of {sheets[0].path} has {len(words)} different words in {rows} "
                "rows, and each is a feature: to leave the column out, list it under data.ignore"
            )
        return Feature(name, tuple(sorted(words)))

    def _labels(self, sheets: Sequence[Sheet]) -> tuple[np.ndarray, tuple[str, ...]]:
        labels: list[str] = []
        for sheet in sheets:
            cells = sheet.column(self.target, "target")
            for row, cell in enumerate(cells):
                if not cell:
                    raise DataError(f"{sheet.cell(row, self.target)} is empty: a row needs a label")
            labels += cells
        return named_labels(labels, f"column '{self.target}'")

    def _client_ids(self, sheets: Mapping[str, Sheet]) -> np.ndarray | None:
        if self.by_client:
            return np.repeat(list(sheets), [len(sheet) for sheet in sheets.values()])
        if self.client:
            return np.array(sheets[""].column(self.client, "client"))
        return None


def _check_pixels(feature: Feature, sheet: Sheet) -> None:
    values = feature.values(sheet)
    wrong = (values < 0) | (values > 255) | (values != np.floor(values))
    row = 0 if feature.words else int(wrong[:, 0].argmax())
    if feature.words or wrong.any():
        cell = sheet.columns[feature.name][row]
        raise DataError(
            f"{sheet.cell(row, feature.name)}: {cell!r} is no pixel: a whole number, 0 … 255"
        )


def _encoded(features: Sequence[Feature], sheets: Sequence[Sheet]) -> np.ndarray:
    rows = [np.hstack([feature.values(sheet) for feature in features]) for sheet in sheets]
    return np.concatenate(rows)


def read_sheet(path: Path, separator: str = ",") -> Sheet:
    if not path.exists():
        raise DataError(f"no such file: {str(path)!r}")
    try:
        with TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            return _read_rows(path, csv.reader(file, delimiter=separator, strict=True))
    except UnicodeDecodeError:
        raise DataError(
            f"{path} cannot be read: it is not UTF-8; save it as CSV in UTF-8"
        ) from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def likely_separator(path: Path) -> str:
    """A comma, or what stands in its place in the first line."""
    try:
        with TextIOWrapper(open_file(path), encoding="utf-8-sig") as file:
            first = file.readline(LONGEST_HEADER)
    except (OSError, UnicodeDecodeError):  # said when the data is read
        return ","
    return max(",;\t", key=first.count)


def _read_rows(path: Path, rows: Iterator[list[str]]) -> Sheet:
    header = [name.strip() for name in next(rows, [])]
    if not any(header):
        raise DataError(f"{path} is empty: the first line must name the columns")
    counts = Counter(header)
    for name in header:
        if not name or counts[name] > 1:
            fault = f"is named '{name}', like another" if name else "has no name"
            raise DataError(
                f"{path}: column {header.index(name) + 1} {fault}; the first line must name the "
                "columns"
            )
    cells: list[list[str]] = []
    lines: list[int] = []
    for row in rows:
        line: int = rows.line_num  # type: ignore[attr-defined]
        if not row:
            continue  # an empty line
        if len(row) != len(header):
            other = likely_separator(path) if len(header) == 1 else ","
            hint = "" if other == "," else f"; set data.separator to {other!r}"
            counted = f"{len(row)} cells, the header has {len(header)}"
            raise DataError(f"{path}, line {line}: {counted}{hint}")
        cells.append([cell.strip() for cell in row])
        lines.append(line)
    if not cells:
        raise DataError(f"{path} has a header and no rows")
    columns = zip(*cells, strict=True)
    return Sheet(
        path, {name: list(column) for name, column in zip(header, columns, strict=True)}, lines
    )


def is_number(cell: str) -> bool:
    """Also where it is too large for a float (1e999), but not for words such as 'inf'."""
    try:
        return math.isfinite(float(cell)) or any(sign.isdigit() for sign in cell)
    except ValueError:
        return False


def numbers(sheet: Sheet, name: str) -> np.ndarray:
    """A column as numbers, or an error that says which cell is none."""
    cells = sheet.columns[name]
    bad = next((row for row, cell in enumerate(cells) if not is_number(cell)), None)
    if bad is None:
        return _in_range(sheet, name, np.array([float(cell) for cell in cells]))
    if not cells[bad]:
        raise _empty(sheet, name)
    raise DataError(
        f"{sheet.cell(bad, name)}: {cells[bad]!r} is not a number; "
        "if the column holds categories, list it under 'categories'"
    )


def _empty(sheet: Sheet, name: str) -> DataError:
    cells = sheet.columns[name]
    others = cells.count("") - 1
    like = f", like {others:,} more of this column" if others else ""
    return DataError(
        f"{sheet.cell(cells.index(''), name)} is empty{like}: fill in a value, or delete the row; "
        "to train without the column, list it under 'ignore'"
    )


def _in_range(sheet: Sheet, name: str, values: np.ndarray) -> np.ndarray:
    large = np.flatnonzero(np.abs(values) > LARGEST)
    if not len(large):
        return values
    raise DataError(
        f"{sheet.cell(large[0], name)}: {sheet.columns[name][large[0]]} {TOO_LARGE}: "
        "scale the column down, or list it under 'ignore'"
    )
