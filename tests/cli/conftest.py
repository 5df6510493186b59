"""What the tests of the command line share."""

import json
from pathlib import Path

import pytest

from tests.conftest import TINY


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(json.dumps(TINY))
    return path
