"""What a shell offers after TAB, for what a command takes a name of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import get_args, get_type_hints

import perfed
from perfed.config import LINKS, preset_names
from perfed.config import STUDIES as STUDY_FILES
from perfed.data.cifar import IMAGE_SETS
from perfed.engines import Execution
from perfed.paper.reproduce import SINGLE, STUDIES

Completion = Callable[[str], list[str]]


def beginning_with(names: Callable[[], Iterable[str]]) -> Completion:
    """Those of ``names`` that begin with what has been typed."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def _choices(option: str) -> Iterable[str]:
    """The values that an option of :class:`~perfed.Execution` may have."""
    assert option in {field.name for field in fields(Execution)}
    return get_args(get_type_hints(Execution)[option])


algorithms = beginning_with(lambda: sorted(perfed.algorithms))
presets = beginning_with(preset_names)  # where none fits, the shell offers files
studies = beginning_with(lambda: preset_names(STUDY_FILES))
links = beginning_with(lambda: preset_names(LINKS))
image_sets = beginning_with(lambda: IMAGE_SETS)
engines = beginning_with(lambda: _choices("engine"))
precisions = beginning_with(lambda: _choices("precision"))
results_of_the_paper = beginning_with(lambda: sorted([*SINGLE, *STUDIES, "all"]))
