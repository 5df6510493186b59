"""What Flower's processes see of the coordinator."""

from __future__ import annotations

import fcntl
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from flwr.app import Array, ArrayRecord, RecordDict

from perfed.core.errors import RunError
from perfed.flower import server_app
from perfed.flower.certificates import fingerprint
from perfed.flower.membership import Unreadable
from perfed.flower.server_app import FlowerTransport
from tests.flower.setting import write_federation
from tests.flower.test_membership import KEY


@pytest.mark.attack(34)
def test_a_second_run_in_one_directory_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flower logs the error that it gets with ``exc_info``."""
    folder = write_federation(tmp_path / "federation")
    (folder / "run").mkdir()
    context = SimpleNamespace(run_config={"coordinator": str(folder / "coordinator.yaml")})
    flower, logged = logging.getLogger("flwr"), list[bool]()
    listening = logging.Handler()
    listening.emit = lambda record: logged.append(bool(record.exc_info))  # type: ignore[method-assign]
    with open(folder / "run" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="in use by another process") as refused:
            server_app.main(cast(Any, None), cast(Any, context))
    flower.addHandler(listening)
    try:
        flower.error("ServerApp raised an exception", exc_info=refused.value)
        flower.error("something else", exc_info=ZeroDivisionError("a bug"))
    finally:
        flower.removeFilter(server_app._without_traceback)
        flower.removeHandler(listening)
    assert capsys.readouterr().out.count("perfed: ") == 1
    assert logged == [False, True]


@pytest.mark.attack(2)
def test_what_cannot_be_read_is_an_answer_and_an_error_of_flowers_is_none() -> None:
    garbage = RecordDict({"about": ArrayRecord({"": Array("uint8", (1,), "x", b"y")})})
    replies = [
        SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id=name),
            content=garbage,
            has_content=lambda has=has: has,
            error=SimpleNamespace(reason="node unavailable"),
        )
        for name, has in (("unreadable", True), ("failed", False))
    ]
    grid = SimpleNamespace(pull_messages=lambda names: replies)
    arrived = FlowerTransport(cast(Any, grid)).receive(["unreadable", "failed"])
    assert isinstance(arrived["unreadable"], Unreadable)
    assert arrived["unreadable"].startswith("not an envelope of perfed")
    assert type(arrived["failed"]) is str


@pytest.mark.attack(13)
def test_a_node_is_known_by_its_key() -> None:
    nodes = [SimpleNamespace(node_id=7, public_key=KEY), SimpleNamespace(node_id=8, public_key=b"")]
    transport = FlowerTransport(cast(Any, SimpleNamespace(get_nodes=lambda: nodes)))
    assert transport.nodes() == [7, 8]
    assert [transport.key(node) for node in (7, 8, 9)] == [fingerprint(KEY), "", ""]
    assert fingerprint(KEY).startswith("SHA256:")
