"""``perfed site check``: all that can be found wrong before joining, at once.

A *fault* keeps the site from joining. A *notice* does not, and may still spoil what it learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from perfed.core.errors import PerfedError, shape_text
from perfed.data import ClientSplit
from perfed.data.likeness import oddities
from perfed.flower.plan import Plan, read_json
from perfed.flower.settings import Read, SiteOptions, label_fault, read_site
from perfed.flower.site import SPLIT_PARTS, Site

T = TypeVar("T")
FEW = {"train": 20, "validation": 5, "test": 20}
"""Samples of a part below which its numbers say little: with 20 to test, one is 5 points."""


@dataclass
class Findings:
    """What is there, and what is wrong with it."""

    lines: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def attempt(self, step: Callable[[], T]) -> T | None:
        """What a step gives; None, and a fault more, where it fails."""
        try:
            return step()
        except PerfedError as error:
            text = " ".join(str(error).split())
            if text not in self.faults:
                self.faults.append(text)
            return None


def check_site(path: Path, plan: Path | None = None) -> Findings:
    """What a site has. With the coordinator's plan, whether it would be agreed to."""
    options = read_site(path)
    found = Findings()
    values = None if plan is None else found.attempt(lambda: read_json(plan))
    with chdir(path.absolute().parent):
        held = found.attempt(
            lambda: options.data.load(options.client, options.split, options.vocabulary)
        )
        public = found.attempt(lambda: options.public.load(options.vocabulary))
    if held is not None:
        (read, y, split) = held
        if fault := label_fault(y, options.classes):
            found.faults.append(f"classes: {fault}")
        _compare(found, read, public)
        if options.data.partition is None:  # or else all sites have the same table
            found.notices += _words(read)
        found.notices += _few(y, split, options)
    if values is not None:
        samples = 0 if held is None else len(held[2].train)
        found.faults += _refusals(values, options, samples, public is not None)
    if not found.faults:
        lines = found.attempt(lambda: Site.open(path).check())
        found.lines += lines or []
    return found


def _compare(found: Findings, own: Read, public: Read | None) -> None:
    if public is None:
        return
    if own.x.shape[1:] != public.x.shape[1:]:
        theirs, ours = shape_text(public.x.shape[1:]), shape_text(own.x.shape[1:])
        columns = ", ".join(own.origin.get("columns", ()))
        found.faults.append(
            f"public: public samples are {theirs}, this site's own are {ours}"
            + (f" ({columns})" if columns else "")
        )
    else:
        found.notices += oddities(own.x, public.x)


def _words(own: Read) -> Iterator[str]:
    """A table has a number for each word that occurs in a column: here, that is."""
    places: dict[str, list[int]] = {}
    titles = own.origin.get("columns", ())
    for place, title in enumerate(titles):
        column, is_word, _ = title.partition("=")
        if is_word:
            places.setdefault(column, []).append(place)
    rows = own.x.reshape(len(own.x), -1)
    for column, those in places.items():
        if not _one_of(rows[:, those]):  # a column of numbers whose name has this sign
            continue
        words = [titles[place].partition("=")[2] for place in those]
        few = ", ".join(words[:5]) + (", …" if len(words) > 5 else "")
        yield (
            f"data: column '{column}' has a number for each word that occurs here ({few}): write "
            "numbers in the file, or every site and the public set must have just these words"
        )


def _one_of(values: np.ndarray) -> bool:
    """Whether each row has a single 1, and else zeros."""
    return bool(np.isin(values, (0, 1)).all() and (values.sum(1) == 1).all())


def _few(y: np.ndarray, split: ClientSplit, options: SiteOptions) -> Iterator[str]:
    for part in SPLIT_PARTS:
        count = len(getattr(split, part))
        if count < FEW[part]:
            yield (
                f"split: {count} samples to {part if part == 'train' else _verb(part)}, fewer than "
                f"{FEW[part]}: a larger share, or more data"
            )
    trained = np.unique(y[split.train])
    for part in ("validation", "test"):
        unseen = np.setdiff1d(y[getattr(split, part)], trained)
        if len(unseen):
            yield (
                f"split: class {', '.join(map(str, unseen))} occurs among samples to {_verb(part)} "
                "and not among those to train"
            )
    largest = np.bincount(y, minlength=options.classes).max() / len(y)
    if len(np.unique(y)) > 1 and largest > 0.95:
        yield f"classes: {100 * largest:.0f} % of the samples are of one class"


def _verb(part: str) -> str:
    return {"validation": "validate", "test": "test"}[part]


def _refusals(values: Any, options: SiteOptions, samples: int, has_public: bool) -> list[str]:
    """All that this site would say to an invitation with this plan."""
    refused = options.agrees.refusals(values, samples)
    if refused:
        return refused
    return [*options.plan_faults(Plan.from_mapping(values), has_public)]
