"""Links: the order of stages, their state, and what both ends may rely on."""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import perfed
from perfed import Execution
from perfed.core import wire
from perfed.core.declaration import PROBABILITIES, Array
from perfed.core.errors import ConfigError, Refused
from perfed.core.message import Message
from perfed.core.schema import option
from perfed.core.tree import Tree
from perfed.core.wire import Link, Stage
from tests.conftest import played, spec, tiny
from tests.runs.test_resume import StopAfter


@dataclass(frozen=True)
class Wrapped(Stage):
    """Puts a name around what is sent, and counts at both ends."""

    mark: str = option("a", "the name")

    directions = ("up", "down")

    def send(self, message: Message, at: Any, state: Tree) -> tuple[Message, Tree]:
        arrays = {f"{self.mark}/{name}": tensor for name, tensor in message.arrays.items()}
        return Message.from_arrays(arrays), _more(state)

    def receive(self, message: Message, at: Any, state: Tree) -> tuple[Message, Tree]:
        arrays = {
            name.removeprefix(f"{self.mark}/"): tensor for name, tensor in message.arrays.items()
        }
        return Message.from_arrays(arrays), _more(state)


@dataclass(frozen=True)
class UpOnly(Wrapped):
    directions = ("up",)


@dataclass(frozen=True)
class Blurred(Stage):
    exact = False

    def receive(self, message: Message, at: Any, state: Tree) -> tuple[Message, Tree]:
        return Message.from_arrays({n: t * 1000 for n, t in message.arrays.items()}), state


@dataclass(frozen=True)
class Stumbling(Stage):
    def receive(self, message: Message, at: Any, state: Tree) -> tuple[Message, Tree]:
        return message["no such\nthing"], state


def _more(state: Tree) -> Tree:
    return {"count": state.get("count", torch.tensor(0)) + 1}


MESSAGE = Message(x=torch.ones(2, 2) / 2)


def test_stages_are_undone_in_the_opposite_order() -> None:
    link = Link((Wrapped(mark="a"), UpOnly(mark="b")), seed=1)
    sent, state = link.send(MESSAGE, 3, 0, "up", {})
    assert list(sent.arrays) == ["b/a/x"]
    assert state == {"up": {"0": {"count": 1}, "1": {"count": 1}}}
    received, there = link.receive(sent, 3, 0, "up", {}, None)
    assert list(received.arrays) == ["x"]
    assert there == state
    sent, later = link.send(MESSAGE, 3, 1, "down", state)
    assert list(sent.arrays) == ["a/x"]
    assert later == state | {"down": {"0": {"count": 1}}}
    assert link.send(MESSAGE, 3, 2, "up", later)[1]["up"] == {
        "0": {"count": 2},
        "1": {"count": 2},
    }
    assert state == {"up": {"0": {"count": 1}, "1": {"count": 1}}}  # nothing is changed in place


def test_an_evaluation_and_the_opening_leave_no_state() -> None:
    link, state = Link((Wrapped(),)), {"down": {"0": {"count": torch.tensor(5)}}}
    for round, direction in ((4, "evaluation"), (-1, "up")):
        sent, after = link.send(MESSAGE, 3, round, direction, state)  # type: ignore[arg-type]
        assert list(sent.arrays) == ["a/x"]
        assert after is state


def test_without_stages_and_without_content_nothing_happens() -> None:
    state: Tree = {}
    for link, message in ((Link(), MESSAGE), (Link((Stumbling(), Wrapped())), Message())):
        sent, after = link.send(message, 0, 0, "up", state)
        assert sent is message
        assert after is state
        received, after = link.receive(message, 0, 0, "up", state, None)
        assert received is message
        assert after is state


@pytest.mark.attack("message-that-breaks-a-stage")
def test_what_a_stage_stumbles_over_is_refused_in_one_line() -> None:
    with pytest.raises(Refused, match="stage 'Stumbling' cannot read it: ") as caught:
        Link((Stumbling(),)).receive(MESSAGE, 0, 0, "up", {}, None)
    assert "\n" not in str(caught.value)


def test_what_is_blurred_comes_back_into_its_range() -> None:
    declared = {"x": Array((2, 2), PROBABILITIES)}
    received, _ = Link((Blurred(),)).receive(MESSAGE, 0, 0, "up", {}, declared)
    assert torch.allclose(received["x"], torch.full((2, 2), 0.5))
    received, _ = Link((Blurred(),)).receive(MESSAGE, 0, 0, "up", {}, None)
    assert torch.allclose(received["x"], torch.full((2, 2), 500.0))


@pytest.mark.attack("lie-through-a-lossy-stage")
def test_on_a_lossy_link_a_lie_counts_as_the_nearest_honest_message_or_not_at_all() -> None:
    lying = {"name": "tests.hostile:Lying", "clients": list(range(6))}
    for lie, refused in (("rows of 1000", 0), ("1e30", 0), ("short", 3), ("NaN", 3), ("bool", 3)):
        wire = [f"{__name__}:Slightly", lying | {"lie": lie}]
        simulation = played(2, wire=wire)
        assert len(simulation.refused) == refused
        centroids = simulation.progress.state["centroids"]
        assert torch.allclose(centroids.sum(2), torch.ones(2, 30), atol=1e-5)


@dataclass(frozen=True)
class Slightly(Stage):
    """Lossy, but loses nothing."""

    exact = False


def test_parameters_do_not_depend_on_stages_and_configurations_name_them(tmp_path: Path) -> None:
    experiment = tiny(wire=[{"name": f"{__name__}:Wrapped", "mark": "marked"}], rounds=1)
    assert experiment.to_mapping()["wire"] == [{"name": f"{__name__}:Wrapped", "mark": "marked"}]
    plain = perfed.run(tiny(rounds=1), tmp_path / "plain")
    wrapped = perfed.run(experiment, tmp_path / "wrapped")
    lines = [
        json.loads((r.path / "rounds.jsonl").read_text().splitlines()[-1]) for r in (plain, wrapped)
    ]
    assert lines[0]["evaluation"] == lines[1]["evaluation"]
    one, other = (line["traffic"] for line in lines)
    assert one["up_parameters"] == other["up_parameters"]
    assert one["up_bytes"] < other["up_bytes"]


def test_the_stage_in_the_documentation_works(tmp_path: Path) -> None:
    block = (wire.__doc__ or "").partition("is a stage::\n")[2].partition("\nAn experiment")[0]
    imports = """
from dataclasses import dataclass
import torch
from perfed.core.message import Message
from perfed.core.wire import Stage, stages
"""
    (tmp_path / "half.py").write_text(imports + textwrap.dedent(block))
    halves = perfed.run(tiny(wire=[f"{tmp_path}/half.py:Half"]), tmp_path / "half")
    whole = perfed.run(tiny(), tmp_path / "whole")
    sent = [r.summary["traffic"]["up_bytes"] for r in (halves, whole)]
    assert 0.5 < sent[0] / sent[1] < 0.6
    lines = (halves.path / "rounds.jsonl").read_text().splitlines()
    assert not any("refused" in json.loads(line) for line in lines)


def test_a_stage_that_does_not_exist_is_said_so() -> None:
    with pytest.raises(ConfigError, match=r"^wire\[0\]\.name: unknown stage 'zip'"):
        tiny(wire=["zip"])
    with pytest.raises(ConfigError, match=r"^wire\[0\]\.name: .*is for algorithm, not stage"):
        tiny(wire=["perfed.algorithms:FedAvg"])


def test_a_checkpoint_from_before_there_were_links_goes_on(tmp_path: Path) -> None:
    whole = perfed.run(tiny(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        perfed.run(
            tiny(),
            tmp_path / "cut",
            callbacks=[StopAfter(2)],
            how=Execution(checkpoint_seconds=0),
        )
    manifest = json.loads((tmp_path / "cut/checkpoint/manifest.json").read_text())
    assert "link" not in manifest["files"]
    config = tmp_path / "cut/config.yaml"
    config.write_text(config.read_text().replace("wire: []\n", ""))
    perfed.resume(tmp_path / "cut")
    names = ("rounds.jsonl", "clients.jsonl")
    assert [(whole.path / n).read_bytes() for n in names] == [
        (tmp_path / "cut" / n).read_bytes() for n in names
    ]


@pytest.mark.parametrize("name", ["fedavg", "hypcluster", "perfed-ckt"])
def test_what_is_sent_to_evaluate_is_counted_apart(name: str, tmp_path: Path) -> None:
    result = perfed.run(tiny(algorithm=spec(name), evaluate_every=2), tmp_path / "run")
    rounds = [json.loads(x) for x in (result.path / "rounds.jsonl").read_text().splitlines()]
    for line in rounds:
        assert ("evaluation_traffic" in line) == ("evaluation" in line)
    crossed = rounds[-1]["evaluation_traffic"]
    assert (crossed["up_bytes"], crossed["up_parameters"]) == (0, 0)
    if name == "perfed-ckt":
        assert crossed["down_bytes"] == 0
    else:  # all six clients get what a round sends to three
        assert crossed["down_bytes"] > 1.5 * rounds[-1]["traffic"]["down_bytes"]
        assert crossed["down_parameters"] >= rounds[-1]["traffic"]["down_parameters"]
