"""Shared by the tests of plug-ins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from perfed import Execution


@pytest.fixture(scope="module")
def workers() -> Iterator[Execution]:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'perfed[ray]'")
    from perfed.engines.ray import session

    with session():
        yield Execution(engine="ray", device="cpu", workers=2)
