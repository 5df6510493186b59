"""What messages are declared to hold, and what is said of those that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import perfed
from perfed.core.admission import check, nearest, refusals
from perfed.core.declaration import (
    COUNTS,
    FREE,
    PROBABILITIES,
    REALS,
    SAMPLES,
    TOLERANCE,
    Array,
    AsMany,
    AtMost,
    Entries,
    Known,
    Maybe,
    Messages,
    Model,
    Numbered,
    PerParameter,
    Probabilities,
    Reals,
    Whole,
    lines,
    networks,
)
from perfed.core.errors import Refused
from perfed.core.message import Message
from perfed.core.tree import Weights
from tests.conftest import MLP_50, played, spec

OWN = Weights(
    {"body.weight": torch.zeros(4, 3), "head.weight": torch.zeros(2, 4)},
    {"mean": torch.zeros(4), "count": torch.tensor(0)},
)
SHARED = Weights({"w": torch.zeros(5)}, {})


def known(**changes: Any) -> Known:
    facts: dict[str, Any] = {
        "sizes": {"P": 6, "N": 3},
        "samples": 12,
        "model": lambda network: SHARED if network else OWN,
        "head": lambda network: "head",
    }
    return Known(**facts | changes)


def fault(declared: Entries | None, message: Message, **changes: Any) -> str:
    return refusals({7: message}, declared, lambda client: known(**changes)).get(7, "")


ROWS = torch.full((6, 3), 1 / 3)


@pytest.mark.attack(8, 9)
@pytest.mark.parametrize(
    ("entry", "right", "wrong", "reason"),
    [
        (Array(("P", "N"), PROBABILITIES), ROWS, ROWS.T, "x: is 3×6, must be |P|×N (6×3)"),
        (Array(("P", "N"), PROBABILITIES), ROWS, ROWS * 3, "x: row 0 sums to 3, must be 1"),
        (Array(("N",), COUNTS), torch.tensor([1.0, 0, 4]), torch.tensor([1.0, 0, -4]), "x: has -4"),
        (Array(("N",), COUNTS), torch.tensor([1.5, 0, 4]), torch.tensor([1, 0, 4]), "x: is int64"),
        (Array((2,), REALS), torch.tensor([-1e9, 1e9]), torch.tensor([0.0, 1e35]), "x: has 1e+35"),
        (Array((2,), REALS), torch.ones(2), torch.ones(2).double(), "is float64, must be float32"),
        (Array((), Reals(0, 1)), torch.tensor(0.5), torch.tensor(1.5), "x: has 1.5, must be"),
        (Array((), Whole(0, 4)), torch.tensor(4), torch.tensor(5), "x: has 5, must be whole"),
        (Array((), Whole(0, 4)), torch.tensor(4), torch.tensor(4.0), "is float32, must be int64"),
        (Array((2,), FREE), torch.ones(2).bool(), torch.ones(3), "x: is 3, must be 2"),
        (Array((AtMost(2), "N"), REALS), torch.ones(1, 3), torch.ones(3, 3), "must be at most 2×N"),
        (Array((AtMost(2), "N"), REALS), torch.ones(2, 3), torch.ones(0, 3), "must be at most 2×N"),
        (SAMPLES, torch.tensor(12), torch.tensor(13), "x: is 13, must be 12, as told on joining"),
    ],
)
def test_an_array_fits_or_it_is_said_why_not(
    entry: Any, right: Tensor, wrong: Tensor, reason: str
) -> None:
    declared = {"x": entry}
    assert fault(declared, Message(x=right)) == ""
    assert reason in fault(declared, Message(x=wrong))
    assert fault(declared, Message()) == "x: is missing"
    assert "an unknown array 'y', must be x" in fault(declared, Message(x=right, y=1))


def test_what_may_be_missing_is_missing_together() -> None:
    declared = {name: Maybe(Array(("N",), REALS)) for name in ("a", "b")}
    assert fault(declared, Message()) == ""
    assert fault(declared, Message(a=torch.ones(3), b=torch.ones(3))) == ""
    assert fault(declared, Message(a=torch.ones(3))) == "b: is missing"
    assert "must be N (3)" in fault(declared, Message(a=torch.ones(2), b=torch.ones(3)))


@pytest.mark.attack("negative-variance")
def test_a_variance_is_not_negative() -> None:
    def model(variance: float) -> Weights:
        return OWN._replace(buffers={"norm.running_var": torch.tensor([variance])})

    def said(variance: float) -> str:
        declared, message = {"model": Model()}, Message(model=model(variance))
        return fault(declared, message, model=lambda network: model(1.0))

    assert said(0.0) == said(2.0) == ""
    assert "running_var: has -1, must be numbers, at least 0" in said(-1.0)


def test_a_size_that_nobody_knows_is_one_size() -> None:
    declared = {"a": Array(("N", "F"), REALS), "b": Array(("F",), REALS)}
    assert fault(declared, Message(a=torch.ones(3, 9), b=torch.ones(9))) == ""
    assert "must be F (9)" in fault(declared, Message(a=torch.ones(3, 9), b=torch.ones(8)))
    sizes = {"N": 3, "F": 4}
    assert "must be N×F (3×4)" in fault(
        declared, Message(a=torch.ones(3, 9), b=torch.ones(9)), sizes=sizes
    )


def test_models_are_of_the_clients_architecture_or_of_a_named_network() -> None:
    model = {"model": Model()}
    assert fault(model, Message(model=OWN)) == ""
    assert "model/params/body.weight: is missing" in fault(
        model, Message(model=OWN._replace(params={"head.weight": torch.zeros(2, 4)}))
    )
    assert "is missing" in fault(model, Message(model=OWN._replace(buffers={})))
    assert fault(model, Message(model=SHARED)) != ""
    assert fault({"model": Model("small")}, Message(model=SHARED)) == ""
    params = OWN.params
    assert fault({"c": PerParameter()}, Message(c=params)) == ""
    head, base = {"weight": params["head.weight"]}, {"body.weight": params["body.weight"]}
    for part, right, wrong in (("head", head, base), ("base", base, head)):
        assert fault({"c": PerParameter(part)}, Message(c=right)) == ""  # type: ignore[arg-type]
        assert fault({"c": PerParameter(part)}, Message(c=wrong)) != ""  # type: ignore[arg-type]
    assert networks({**model, "c": Numbered(PerParameter("all", "small"), 2)}) == {"", "small"}


def test_several_go_by_number() -> None:
    few, both = {"m": Numbered(Model(), AtMost(2))}, {"m": Numbered(Model(), 2)}
    for count in range(4):
        message = Message(m={str(n): OWN for n in range(count)})
        assert (fault(few, message) == "") == (count <= 2)
        assert (fault(both, message) == "") == (count == 2)
    assert "m: there are 3, must be at most 2" in fault(
        few, Message(m={str(n): OWN for n in range(3)})
    )
    assert fault(few, Message(m={"first": OWN})) != ""
    amounts = {"amounts": Array((AsMany("m"),), Reals(0, 1))}
    received = Message(m={"0": OWN, "1": OWN})
    assert fault(amounts, Message(amounts=torch.ones(2)), received=received) == ""
    assert fault(amounts, Message(amounts=torch.ones(0))) == ""
    assert "is 3, must be as many as m (2)" in fault(
        amounts, Message(amounts=torch.ones(3)), received=received
    )


@pytest.mark.attack(3, 4)
def test_each_message_is_measured_alone() -> None:
    declared = {"x": Array((2,), REALS)}
    messages = {
        0: Message(x=torch.ones(2)),
        1: Message(x=torch.tensor([float("nan"), 1])),
        2: Message(x=torch.ones(3)),
        3: Message(x=torch.zeros(2)),
        4: "a text",
    }
    found = refusals(messages, declared, lambda client: known())  # type: ignore[arg-type]
    assert found == {
        1: "x: is not finite",
        2: "x: is 3, must be 2",
        4: "is a str, must be a message",
    }


def test_nothing_declared_is_anything_finite() -> None:
    assert fault(None, Message(anything=torch.ones(3).bool(), deep={"a": torch.ones(1)})) == ""
    assert "is not finite" in fault(None, Message(x=torch.tensor(float("inf"))))
    with pytest.raises(Refused, match="x: is not finite"):
        check(Message(x=torch.tensor(float("-inf"))), None, known())


@given(st.integers(0, 10**6), st.integers(1, 2000), st.floats(0.01, 30))
def test_softmax_in_few_bits_is_admitted_and_little_more(seed: int, n: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(4, n, generator=generator)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        rows = logits.to(dtype).softmax(1).float()
        assert bool(PROBABILITIES.holds(rows, known()))
        assert not PROBABILITIES.holds(rows * (1 + 3 * TOLERANCE), known())


@given(st.lists(st.lists(st.floats(-5, 5, width=32), min_size=3, max_size=3), min_size=1))
def test_the_nearest_probabilities_are_the_nearest(rows: list[list[float]]) -> None:
    values = torch.tensor(rows)
    found = Probabilities().nearest(values)
    assert bool(PROBABILITIES.holds(found, known()))
    grid = torch.tensor(
        [(a / 20, b / 20, 1 - a / 20 - b / 20) for a in range(21) for b in range(21 - a)]
    ).clamp(min=0)
    best = (values[:, None] - grid).square().sum(2).min(1).values
    assert bool(((values - found).square().sum(1) <= best + 1e-4).all())
    assert torch.allclose(Probabilities().nearest(found), found, atol=1e-6)


def test_the_nearest_are_found_however_far_away() -> None:
    far = torch.tensor([[1e30, 1e30, -1e30], [-3e38, -3e38, -3e38], [0.2, 0.3, 0.5]])
    found = nearest(
        Message(x=far, n=torch.tensor(-3), r=torch.tensor([-9.0, 0.5]), m=OWN),
        {"x": Array((3, 3), PROBABILITIES), "r": Array((2,), Reals(-1, 1)), "m": Model()},
    )
    assert torch.allclose(found["x"], torch.tensor([[0.5, 0.5, 0], [1 / 3] * 3, [0.2, 0.3, 0.5]]))
    assert found["r"].tolist() == [-1.0, 0.5]
    assert int(found["n"]) == -3


@pytest.mark.parametrize("name", list(perfed.algorithms))
def test_every_algorithm_declares_what_it_sends(name: str) -> None:
    """In every direction; and what it sends fits, for three architectures with BatchNorm."""
    declared = perfed.algorithms[name]().messages()
    assert None not in (declared.up, declared.down, declared.evaluation)
    models = {"architectures": [MLP_50, {"name": "cnn", "batchnorm": True}]}
    simulation = played(3, algorithm=spec(name), models=models)
    assert not simulation.refused
    declared = simulation.algorithm.messages()
    server = simulation.server(3)
    for client in range(3):
        info, state = simulation.info(client), simulation.progress.state
        facts = simulation.known(client)
        check(simulation.algorithm.broadcast(server, state, info), declared.down, facts)
        check(
            simulation.algorithm.evaluation_message(server, state, info), declared.evaluation, facts
        )


def test_a_declaration_is_read_by_people() -> None:
    messages = Messages(
        up={"rows": Array(("P", "N"), PROBABILITIES), "cluster": Array((), Whole(0, 2))},
        down={"models": Numbered(Model("small"), AtMost(3)), "c": PerParameter("head")},
    )
    assert lines(messages) == [
        "client → server: rows, |P|×N probabilities",
        "client → server: cluster, a whole number from 0 to 2",
        "server → client: models, at most 3 × weights of 'small'",
        "server → client: c, a number for each parameter of the head of the client's network",
        "server → client, to evaluate: not declared",
    ]
    assert lines(Messages()) == ["messages: nothing is declared; any finite numbers are admitted"]
