"""What does not fit is left out, alone, and a run goes on as if it had never been sent."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import perfed
from perfed.algorithms.fedavg import FedAvg
from perfed.core.algorithm import Algorithm
from perfed.core.declaration import PROBABILITIES, Array, Messages
from perfed.core.errors import ConfigError, Diverged, Refused, RunError
from perfed.core.message import Message
from perfed.core.tree import Tree, flatten
from perfed.core.wire import At, Stage
from perfed.engines import Execution
from tests.conftest import SEQUENTIAL, STACKED, played, simulate, spec, tiny
from tests.engines.test_stacked import MIXED
from tests.hostile import EVERY, LIES

PLUGINS = Path(__file__).parents[1] / "plugins"
SAME = {"architectures": [{"name": "mlp", "hidden": [8]}]}


@dataclass(frozen=True)
class Lost(Stage):
    """What client 1 sends, from round 1 on, does not arrive."""

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        if at.client == 1 and at.round >= 1:
            raise Refused("lost")
        return message, state


@dataclass(frozen=True)
class LostOnce(Stage):
    """What client 1 sends in round 1 does not arrive."""

    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        if (at.client, at.round, at.direction) == (1, 1, "up"):
            raise Refused("lost")
        return message, state


def read_rounds(result: perfed.Result) -> list[str]:
    return (result.path / "rounds.jsonl").read_text().splitlines()


def after_two_rounds(name: str, wire: list[Any], everyone: bool = True) -> Any:
    simulation = simulate(algorithm=spec(name), models=SAME, wire=wire)
    simulation.select = lambda round: [0, 1, 2, 3]  # type: ignore[method-assign]
    from perfed.core.channel import Channel

    channel = Channel()
    simulation.begin(channel)
    for round in range(2):
        simulation.play_round(round, channel)
    return simulation


@pytest.mark.parametrize(("name", "lie"), EVERY)
def test_a_lie_is_refused_alone_and_merge_never_sees_it(name: str, lie: str) -> None:
    lying = {"name": "tests.hostile:Lying", "algorithm": name, "lie": lie}
    simulation = after_two_rounds(name, [lying])
    assert list(simulation.refused) == [1]
    assert LIES[name][lie][1] in simulation.refused[1]
    assert "\n" not in simulation.refused[1]
    reference = after_two_rounds(name, [f"{__name__}:Lost"])
    ours, theirs = flatten(simulation.progress.state), flatten(reference.progress.state)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[path], theirs[path]) for path in ours)


def test_several_that_lie_do_not_end_the_run_nor_harm_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lying = {"name": "tests.hostile:Lying", "clients": [0, 1, 2, 4], "lie": "short"}
    experiment = tiny(wire=[lying], clients_per_round=6, rounds=3)
    with caplog.at_level(logging.WARNING, "perfed"):
        result = perfed.run(experiment, tmp_path / "run", how=SEQUENTIAL)
    rounds = [json.loads(x) for x in (result.path / "rounds.jsonl").read_text().splitlines()]
    assert [sorted(line.get("refused", {})) for line in rounds] == [
        [],
        [],
        ["0", "1", "2", "4"],
        ["0", "1", "2", "4"],
    ]
    assert rounds[-1]["refused"]["4"] == "soft_decisions: is 3×10, must be |P|×N (30×10)"
    assert "round 2: refused 4; client 0: soft_decisions: is 3×10" in caplog.text


def test_where_nobody_is_admitted_the_state_stays(tmp_path: Path) -> None:
    everyone = {"name": "tests.hostile:Lying", "clients": list(range(6)), "lie": "NaN"}
    simulation = played(1, wire=[everyone])
    before = simulation.progress.state
    from perfed.core.channel import Channel

    simulation.play_round(1, Channel())
    assert simulation.progress.state is before
    assert len(simulation.refused) == 3


@dataclass(frozen=True)
class Deaf(Stage):
    def receive(self, message: Message, at: At, state: Tree) -> tuple[Message, Tree]:
        raise Refused("cannot hear you")


def test_without_any_first_message_there_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no first message is admitted; client \d: cannot hear you"):
        perfed.run(tiny(wire=[Deaf]), tmp_path / "run", how=SEQUENTIAL)


@dataclass(frozen=True)
class Silent(Algorithm):
    """Forgets to return."""

    def client_round(self, client: Any, message: Message) -> Any:
        client.sgd(client.weights, perfed.core.algorithm.supervised)


@dataclass(frozen=True)
class Rows(Algorithm):
    """Declares rows of probabilities, and sends something else in round 1."""

    def messages(self) -> Messages:
        return Messages(up={"rows": Array((2, "N"), PROBABILITIES)})

    def client_round(self, client: Any, message: Message) -> Message:
        rows = torch.full((2, 10), 0.1)
        return Message(rows=rows * 2 if client.round == 1 else rows)


def test_a_users_own_declaration_counts() -> None:
    simulation = played(1, algorithm=Rows())
    assert not simulation.refused
    simulation = played(2, algorithm=Rows())
    assert set(simulation.refused.values()) == {"rows: row 0 sums to 2, must be 1"}


@dataclass(frozen=True)
class Undeclared(Algorithm):
    """Sends what it likes; numbers, that is."""

    bad: bool = False

    def client_round(self, client: Any, message: Message) -> Message:
        return Message(a=torch.tensor(float("inf") if self.bad else -1.0), b=torch.ones(3).bool())


def test_undeclared_messages_must_be_finite_and_no_more() -> None:
    assert not played(2, algorithm=Undeclared()).refused
    with pytest.raises(Diverged, match=r"'a' of client \d is not finite"):  # and nobody's is
        played(1, algorithm=Undeclared(bad=True))


@dataclass(frozen=True)
class Overflowing(FedAvg):
    """In round 1, what client 1 sends is beyond all numbers; what it keeps is not."""

    def client_round(self, client: Any, message: Message) -> Message:
        reply = super().client_round(client, message)
        if client.id != 1 or client.round != 1:
            return reply
        return Message.from_arrays({k: v * float("inf") for k, v in reply.arrays.items()})


@pytest.mark.attack(1)
@pytest.mark.parametrize(
    ("how", "wire"),
    [
        (SEQUENTIAL, []),
        (STACKED, [f"{PLUGINS}/eight_bit.py:EightBit"]),
        pytest.param(Execution(engine="ray", workers=2), [], marks=pytest.mark.ray),
    ],
    ids=["sequential", "stacked, 8 bits", "ray"],
)
def test_a_message_that_is_not_finite_is_left_out_and_the_run_goes_on(
    how: Execution, wire: list[str], tmp_path: Path
) -> None:
    def lines(name: str, stages: list[str], how: Execution) -> list[dict[str, Any]]:
        same = {"models": SAME, "wire": wire + stages, "clients_per_round": 6, "rounds": 3}
        result = perfed.run(tiny(algorithm=name, **same), tmp_path / name[-6:], how=how)
        return [*map(json.loads, read_rounds(result))]

    spoilt = lines(f"{__name__}:Overflowing", [], how)
    assert [line.get("refused", {}).keys() for line in spoilt] == [set(), {"1"}, set()]
    assert "is not finite" in spoilt[1]["refused"]["1"]
    lost = lines("fedavg", [f"{__name__}:LostOnce"], SEQUENTIAL)
    for ours, theirs in zip(spoilt, lost, strict=True):
        loss = theirs["evaluation"]["global"]["test_loss"]
        assert ours["evaluation"]["global"]["test_loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.attack(67)
def test_a_client_round_returns_a_message() -> None:
    with pytest.raises(ConfigError, match="client_round of 'Silent' returned NoneType: must be a"):
        played(1, algorithm=Silent())


def test_training_that_diverges_ends_the_run_through_stages_too() -> None:
    training = {"steps": 2, "learning_rate": 1e30}
    wire = [f"{PLUGINS}/eight_bit.py:EightBit"]
    with pytest.raises(Diverged, match="is not finite"):
        played(2, training=training, models=MIXED, wire=wire, algorithm="fedavg")


def test_noise_makes_no_probability_negative(tmp_path: Path) -> None:
    """On a link that is not exact, what arrives is brought into its range: merge may rely on it."""
    plugin = Path(__file__).parents[1] / "plugins" / "gaussian_noise.py"
    noise = {"name": f"{plugin}:GaussianNoise", "deviation": 0.5}
    simulation = played(2, algorithm=spec("perfed-evidence"), models=MIXED, wire=[noise])
    assert not simulation.refused
    for sent in simulation.progress.state["bank"].values():
        assert float(sent["soft_decisions"].min()) >= 0
        assert torch.allclose(sent["soft_decisions"].sum(1), torch.ones(30))
