"""A codec, noise and a stage with state, each one file outside the package, and the package's own
codecs: on every engine, after a resume, and at sites."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import perfed
from perfed import Execution
from perfed.core.channel import Channel
from perfed.core.message import Message
from perfed.core.tree import Weights, flatten
from perfed.core.wire import At, Link, stages
from perfed.runs.simulation import Simulation
from tests.conftest import RAY, SEQUENTIAL, STACKED, spec, tiny
from tests.engines.test_stacked import MIXED, assert_same
from tests.flower.setting import desk, simulated, write_federation
from tests.flower.test_coordinator import Killed, assert_same_numbers, lines, run
from tests.runs.test_resume import StopAfter, contents

HERE = Path(__file__).parent
EIGHT_BIT: dict[str, Any] = {"name": f"{HERE}/eight_bit.py:EightBit"}
STOCHASTIC = EIGHT_BIT | {"rounding": "stochastic"}
NOISE: dict[str, Any] = {"name": f"{HERE}/gaussian_noise.py:GaussianNoise", "norm": 50.0}
DIFFERENCE: dict[str, Any] = {"name": f"{HERE}/difference.py:Difference"}
CACHED = {"name": "cached", "share": 0.5, "down_share": 0.5}
NUMBER_BITS = {"name": "number-bits", "bits": 4}
CODECS: dict[str, list[Any]] = {
    "few bits": [{"name": "probability-bits", "bits": 2}, CACHED, NUMBER_BITS, "deflate"],
    "few classes": [{"name": "cached", "threshold": 0.01}, "top-probabilities", "deflate"],
    "few changes": [{"name": "top-changes", "share": 0.1}, NUMBER_BITS, "deflate"],
}
"""Every codec of the package is in one of them."""
WIRES = {
    "eight-bit": [EIGHT_BIT],
    "stochastic": [STOCHASTIC],
    "noise": [NOISE],
    "difference": [DIFFERENCE],
    "all": [NOISE, DIFFERENCE, STOCHASTIC],
}
NAMES = [
    "perfed-ckt",
    "perfed-evidence",
    "perfed-kin",
    "fedavg",
    "scaffold",
    "fedfomo",
    "hypcluster",
]
CODED = [
    ("few bits", "perfed-kin"),
    ("few classes", "perfed-ckt"),
    ("few changes", "fedavg"),
]
AT = At(seed=3, client=1, round=2, direction="up", stage=0)
messages = st.integers(0, 999).map(
    lambda seed: Message(
        soft_decisions=torch.rand(7, 5, generator=torch.Generator().manual_seed(seed)).softmax(1),
        model=Weights({"a.b": 1e3 * torch.randn(4, 3)}, {"n": torch.tensor(seed)}),
        samples=seed,
        amounts=torch.zeros(0),
    )
)


def played(how: Execution, rounds: int = 3, **changes: Any) -> Simulation:
    simulation, channel = Simulation(tiny(**changes), how=how), Channel()
    simulation.begin(channel)
    for round in range(rounds):
        simulation.play_round(round, channel)
        assert not simulation.refused
    return simulation


@given(messages)
def test_a_nearest_level_is_at_most_half_a_step_away(message: Message) -> None:
    codec = stages.build(EIGHT_BIT)
    sent, _ = codec.send(message, AT, {})
    again, _ = codec.receive(sent, AT, {})
    assert again.arrays.keys() == message.arrays.keys()
    for name, values in message.arrays.items():
        assert (again.arrays[name].shape, again.arrays[name].dtype) == (values.shape, values.dtype)
        if values.is_floating_point() and values.numel():
            step = (values.max() - values.min()) / 255
            error = (again.arrays[name] - values).abs().max()
            assert error <= step * 0.5001 + 1e-6 * values.abs().max()
        else:
            assert torch.equal(again.arrays[name], values)


def test_stochastic_rounding_is_right_on_average_and_addressed() -> None:
    codec = stages.build(STOCHASTIC)
    message = Message(x=torch.tensor([0.0, 0.1234, 1.0]).repeat(4000))

    def received(at: At) -> torch.Tensor:
        again: torch.Tensor = codec.receive(codec.send(message, at, {})[0], at, {})[0]["x"]
        return again

    found = received(AT)
    assert float(found[1::3].mean()) == pytest.approx(0.1234, abs=2e-4)
    assert torch.equal(found, received(AT))
    for other in ({"seed": 4}, {"client": 2}, {"round": 3}, {"direction": "down"}, {"stage": 1}):
        assert not torch.equal(found, received(At(**(vars(AT) | other))))


def test_noise_has_its_moments_and_a_norm_its_limit() -> None:
    stage = stages.build(NOISE | {"deviation": 0.25, "norm": 2.0})
    values = torch.full((200, 100), 5.0)
    weights = Weights({"x": values}, {"variance": torch.ones(3)})
    sent, _ = stage.send(Message(a=values, model=weights, samples=4), AT, {})
    limited = 2.0 / (200 * 100) ** 0.5
    noise = (sent["a"] - limited).numpy() / 0.25
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert (noise**3).mean() == pytest.approx(0, abs=0.08)
    assert (noise**4).mean() == pytest.approx(3, abs=0.2)
    assert abs(np.corrcoef(noise[:, 0], noise[:, 1])[0, 1]) < 0.3
    assert torch.equal(sent["model"].buffers["variance"], torch.ones(3))
    assert int(sent["samples"]) == 4
    assert not torch.equal(sent["a"], sent["model"].params["x"])  # another array, another stream


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("wire", "name"),
    [
        *((wire, "perfed-ckt") for wire in WIRES),
        *(("all", n) for n in NAMES[1:]),
        *CODED,
    ],
)
def test_stacked_is_as_sequential(wire: str, name: str) -> None:
    changes = {"algorithm": spec(name), "models": MIXED, "wire": (WIRES | CODECS)[wire]}
    assert_same(played(STACKED, **changes), played(SEQUENTIAL, **changes), 1e-8)


@pytest.mark.ray
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("wire", "name"), [*(("all", name) for name in NAMES), *CODED])
def test_ray_is_as_stacked(wire: str, name: str) -> None:
    changes = {"algorithm": spec(name), "models": MIXED, "wire": (WIRES | CODECS)[wire]}
    simulation = played(RAY, **changes)
    simulation.engine.collect(simulation.population)
    reference = played(STACKED, **changes)
    assert_same(simulation, reference, 1e-8)
    assert_same_link(simulation, reference)
    simulation.engine.close()


def assert_same_link(one: Simulation, other: Simulation) -> None:
    ends = [(s.progress.link, {k: r.kept for k, r in s.records.items()}) for s in (one, other)]
    left, right = (
        flatten({"server": server, "clients": {str(k): kept for k, kept in clients.items()}})
        for server, clients in ends
    )
    assert left.keys() == right.keys()
    assert left
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-8, atol=1e-8)


def test_both_ends_keep_the_same_and_only_who_took_part() -> None:
    simulation = played(SEQUENTIAL, models=MIXED, wire=[DIFFERENCE])
    trained = sorted(simulation.progress.trained)
    assert sorted(map(int, simulation.progress.link)) == trained
    for client in trained:
        server = flatten(simulation.progress.link[str(client)])
        kept = flatten(simulation.records[client].kept["link"])
        assert kept.keys() == server.keys() == {"up/0/last/soft_decisions", "up/0/number"}
        assert all(torch.equal(kept[name], server[name]) for name in kept)
        assert int(server["up/0/number"]) == simulation.progress.trained[client]


@pytest.mark.parametrize(
    ("wire", "name"),
    [*itertools.product(["stochastic", "all"], ["perfed-ckt", "fedavg"]), *CODED],
)
def test_resumed_it_ends_with_the_same_bytes(wire: str, name: str, tmp_path: Path) -> None:
    experiment = tiny(algorithm=spec(name), wire=(WIRES | CODECS)[wire], rounds=4)
    whole = perfed.run(experiment, tmp_path / "whole")
    how = Execution(checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        perfed.run(experiment, tmp_path / "cut", callbacks=[StopAfter(2)], how=how)
    files = json.loads((tmp_path / "cut/checkpoint/manifest.json").read_text())["files"]
    assert ("link" in files) == (wire in ("all", "few bits", "few classes"))  # the server's end
    perfed.resume(tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(whole.path)


@pytest.mark.parametrize("wire", [*WIRES, *CODECS])
def test_sites_give_what_the_simulation_gives(wire: str, tmp_path: Path) -> None:
    names = dict(CODED).get(wire)
    for name in [names] if names else ("perfed-ckt", "perfed-kin", "scaffold"):
        changes = {"algorithm": spec(name), "wire": (WIRES | CODECS)[wire]}
        folder = write_federation(tmp_path / name / "federation", **changes)
        through = desk(folder)
        run(folder, through)
        simulated(tmp_path / name / "simulation", **changes)
        assert_same_numbers(folder / "run", tmp_path / name / "simulation")
        assert not any("refused" in line for line in lines(folder / "run", "rounds.jsonl"))


def test_a_killed_coordinator_keeps_its_end_of_the_link(tmp_path: Path) -> None:
    """Killed in round 1, while the last site works; the sites' ends have moved on already."""
    folder = write_federation(tmp_path / "federation", wire=WIRES["all"])
    asked: list[int] = []

    def fate(node: int, task: Any) -> None:
        if (task.header.kind, task.header.round) == ("round", 1):
            asked.append(node)
            if len(asked) == 3:
                raise Killed

    with pytest.raises(Killed):
        run(folder, desk(folder, fate))
    run(folder, desk(folder))
    simulated(tmp_path / "simulation", wire=WIRES["all"])
    assert_same_numbers(folder / "run", tmp_path / "simulation")


def test_sites_go_on_after_answers_were_lost(tmp_path: Path) -> None:
    """The answer of one site never comes in round 1; the site's end of the link has moved on."""
    wire = [{"name": "probability-bits", "bits": 8}, "cached", "deflate"]
    folder = write_federation(
        tmp_path / "federation",
        wire=wire,
        rounds=4,
        options={"deadline": 0.3, "minimum": 2},
    )
    gone: list[int] = []

    def fate(node: int, task: Any) -> str | None:
        if (node, task.header.kind, task.header.round) == (11, "round", 1):
            gone.append(node)
            return "lost"
        return None

    run(folder, desk(folder, fate))
    rounds = lines(folder / "run", "rounds.jsonl")
    assert gone
    assert 1 not in next(line["clients"] for line in rounds if line["round"] == 1)
    assert rounds[-1]["clients"] == [0, 1, 2]
    assert not any("refused" in line for line in rounds)


def test_bytes_are_counted_as_sent_and_parameters_as_written(tmp_path: Path) -> None:
    for name in ("perfed-ckt", "fedavg"):
        changes = {"algorithm": spec(name), "data": {"name": "digits", "public": 400}}
        plain = perfed.run(tiny(**changes), tmp_path / name / "plain", how=SEQUENTIAL)
        coded = perfed.run(
            tiny(**changes, wire=[EIGHT_BIT]), tmp_path / name / "coded", how=SEQUENTIAL
        )
        for one, other in zip(
            *(lines(r.path, "rounds.jsonl") for r in (coded, plain)), strict=True
        ):
            now, before = one["traffic"], other["traffic"]
            for way in ("up", "down"):
                assert now[f"{way}_parameters"] == before[f"{way}_parameters"]
                assert now[f"{way}_bytes"] <= 0.5 * before[f"{way}_bytes"]
            if name == "fedavg" and one["round"] >= 0:
                evaluated = [line["evaluation_traffic"] for line in (one, other)]
                assert evaluated[0]["down_parameters"] == evaluated[1]["down_parameters"] > 0
                assert 0 < evaluated[0]["down_bytes"] <= 0.5 * evaluated[1]["down_bytes"]
                assert evaluated[0]["up_bytes"] == 0


def test_what_the_channel_counts_is_what_is_sent(tmp_path: Path) -> None:
    from perfed.core import tensorfile

    folder = write_federation(
        tmp_path / "federation", wire=CODECS["few changes"], algorithm="fedavg"
    )
    through = desk(folder)
    answers: list[Any] = []
    receive = through.receive

    def listening(names: Any) -> Any:
        arrived = receive(names)
        answers.extend(arrived.values())
        return arrived

    through.receive = listening  # type: ignore[method-assign]
    run(folder, through)
    up: dict[int, int] = {}
    for answer in answers:
        if answer.header.kind == "round":
            size = len(tensorfile.encode_message(answer.message.arrays))
            up[answer.header.round] = up.get(answer.header.round, 0) + size
    down: dict[tuple[str, int], int] = {}
    for _, task in through.tasks:
        key = (task.header.kind, task.header.round)
        size = len(tensorfile.encode_message(task.message.arrays)) if task.message.arrays else 0
        down[key] = down.get(key, 0) + size
    for line in lines(folder / "run", "rounds.jsonl"):
        assert line["traffic"]["down_bytes"] == down["round", line["round"]]
        assert line["traffic"]["up_bytes"] == up[line["round"]]
        assert line["evaluation_traffic"]["down_bytes"] == down["evaluate", line["round"]]


def test_a_garbled_code_is_refused() -> None:
    link = Link((stages.build(EIGHT_BIT),), seed=0)
    for arrays in (
        {"levels/x": torch.zeros(3, dtype=torch.uint8)},
        {"levels/x": torch.zeros(3, dtype=torch.uint8), "scale/x": torch.zeros(5)},
    ):
        with pytest.raises(perfed.PerfedError, match="stage 'eight-bit' cannot read it: "):
            link.receive(Message.from_arrays(arrays), 0, 0, "up", {}, None)
