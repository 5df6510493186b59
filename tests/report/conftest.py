"""A comparison that has something for every chart, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

import perfed
from perfed.config import parse
from tests.conftest import TINY

ALGORITHMS = [
    "local",
    "fedavg",
    {"name": "perfed-ckt", "clusters": 2, "weight": 1.0},
    {"name": "hypcluster", "clusters": 2},
]


@pytest.fixture(scope="session")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> perfed.ComparisonResult:
    values = TINY | {"algorithms": ALGORITHMS, "seeds": [0, 1, 2], "rounds": 6}
    del values["algorithm"]
    path: Path = tmp_path_factory.mktemp("report") / "comparison"
    return perfed.compare(parse(values), path)  # type: ignore[arg-type]
