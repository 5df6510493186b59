"""Algorithms of a user's own that break the contract: one line, the same on every engine."""

from pathlib import Path

import pytest

import perfed
from perfed.algorithms.local import Local
from perfed.core.algorithm import Client, weighted_average
from perfed.core.declaration import SAMPLES, Messages
from perfed.core.errors import ConfigError, Diverged, PerfedError
from perfed.core.message import Message
from tests.conftest import SEQUENTIAL, STACKED, tiny

TEXT = """
from dataclasses import dataclass

import torch

from perfed import Message, Weights
from perfed.core.algorithm import Algorithm, supervised, weighted_average
from perfed.core.schema import option


@dataclass(frozen=True)
class Own(Algorithm):
    how: str = option("", "what goes wrong")

    def start(self, server):
        return {} if self.how != "start" else None

    def broadcast(self, server, state, client):
        return Message(number=1) if self.how != "broadcast" else {"a": 1}

    def client_round(self, client, message):
        weights = client.weights
        params, name = dict(weights.params), next(iter(weights.params))
        if client.round < 1:
            return Message(model=weights, samples=client.samples)
        if self.how in ("missing", "kept missing"):
            del params[name]
        elif self.how in ("extra", "kept extra"):
            params["extra"] = params[name]
        elif self.how == "shape":
            params[name] = params[name][:1]
        given = weights._replace(params=params)
        if self.how.startswith("kept"):
            client.weights = given
        elif self.how == "forward":
            client.logits(params)
        elif self.how == "dict":
            return {"model": weights}
        elif self.how == "nothing":
            return None
        elif self.how == "raise":
            raise ValueError("a mistake\\nof two lines")
        elif self.how == "state":
            client.state = {"note": "text"}
        elif self.how == "infinite":
            client.state = {"share": torch.tensor(float("inf"))}
        else:
            client.weights = client.sgd(given, supervised, steps=1)
        if self.how == "empty":
            return Message()
        if self.how in ("negative", "zero"):
            return Message(model=weights, samples=-5 if self.how == "negative" else 0)
        return Message(model=weights, samples=client.samples)

    def merge(self, server, state, replies):
        if self.how == "merged":
            return [1]
        if self.how == "diverged":
            return {"share": torch.tensor(float("nan"))}
        for reply in replies[:1]:
            weighted_average([reply.message["model"]], [float(reply.message["samples"])])
        return state

    def models(self, client, message):
        return {"personal": client.weights} if self.how != "models" else None

    def describe(self, before, state):
        if self.how == "describe":
            return {"share": 1 / 0}
        if self.how == "diverged":
            return {"share": float(state["share"])}
        return {"share": torch.ones(()) if self.how == "tensor" else 1.0}
"""


class Speechless(Local):
    """What it does for others goes wrong."""

    def messages(self) -> Messages:
        return Messages(up={"samples": SAMPLES}, down={}, evaluation={})

    def speak(self, client: Client, message: Message) -> Message:
        raise ValueError("no words")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(TEXT)
    return tmp_path / "own.py"


def refusal(file: Path, how: str, execution: perfed.Execution) -> str:
    algorithm = {"name": f"{file}:Own", "how": how}
    experiment = tiny(algorithm=algorithm, models={"architectures": [{"name": "mlp"}]}, rounds=2)
    with pytest.raises(PerfedError) as caught:
        perfed.run(experiment, file.parent / execution.engine / how, how=execution)
    return str(caught.value)


WEIGHTS = {
    "missing": "gives weights of 'mlp' without '1.weight'",
    "extra": "gives weights of 'mlp' with an unknown 'extra'",
    "shape": "gives weights of 'mlp' whose '1.weight' is ",
    "kept missing": "gives weights of 'mlp' without '1.weight'",
    "kept extra": "gives weights of 'mlp' with an unknown 'extra'",
    "forward": "'Own' gives dict: must be perfed.Weights",
}


@pytest.mark.attack(71)
@pytest.mark.ray
def test_engines_agree_on_malformed_weights(file: Path) -> None:
    ray = perfed.Execution(engine="ray", device="cpu", workers=1)
    with ray.several_runs():
        for how, message in WEIGHTS.items():
            said = {refusal(file, how, execution) for execution in (SEQUENTIAL, STACKED, ray)}
            assert len(said) == 1
            assert message in said.pop()


@pytest.mark.attack(67, 68)
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("start", "own.py, line 15: start of 'Own' returned NoneType: must be a state"),
        ("broadcast", "own.py, line 18: broadcast of 'Own' returned dict: must be a Message"),
        ("nothing", "own.py, line 21: client_round of 'Own' returned NoneType: must be a Message"),
        ("dict", "own.py, line 21: client_round of 'Own' returned dict: must be a Message"),
        ("raise", "own.py, line 42: client_round of 'Own' raised ValueError: a mistake of two li"),
        ("state", "own.py, line 44: client.state: 'note' is a str: must be a tensor"),
        ("empty", "own.py, line 61: merge of 'Own' raised KeyError: 'model'; it must return a st"),
        ("negative", "own.py, line 61: weighted_average by amounts -5: each must be at least 0"),
        ("zero", "own.py, line 61: weighted_average by amounts 0: each must be at least 0"),
        ("merged", "merge of 'Own' returned list: must be a state"),
        ("models", "models of 'Own' returned NoneType: must be models by kind"),
    ],
)
def test_a_broken_contract_is_one_line(file: Path, how: str, message: str) -> None:
    assert message in refusal(file, how, STACKED)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("infinite", "round 1: 'share' of client "),
        ("describe", "describe of 'Own' raised ZeroDivisionError: division by zero"),
        ("tensor", "describe of 'Own' raised TypeError: Object of type Tensor is not JSON serial"),
    ],
)
def test_what_cannot_be_written_down_is_one_line(file: Path, how: str, message: str) -> None:
    assert message in refusal(file, how, STACKED)


def test_a_server_that_diverges_is_told_before_it_describes_itself(file: Path) -> None:
    """A comparison goes on with its other methods then; it ended with a mistake in 'describe'."""
    algorithm = {"name": f"{file}:Own", "how": "diverged"}
    with pytest.raises(Diverged, match="round 0: 'share' of the server is not finite"):
        perfed.run(tiny(algorithm=algorithm), file.parent / "run", how=SEQUENTIAL)


def test_a_mistake_in_what_is_said_under_privacy_is_one_line(tmp_path: Path) -> None:
    name = f"{__name__}:{Speechless.__name__}"
    with pytest.raises(ConfigError, match="speak of 'Speechless' raised ValueError: no words; it"):
        perfed.run(tiny(algorithm=name, privacy={"noise": 1.0}), tmp_path / "run")


@pytest.mark.attack(68)
@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_rounds_before_a_mistake_are_kept(file: Path, side_by_side: bool) -> None:
    """And after it is mended the run goes on, to what it would have been."""
    algorithm = {"name": f"{file}:Own", "how": "raise"}
    experiment = tiny(algorithm=algorithm)
    folder = file.parent / "run"
    if side_by_side:
        comparison = perfed.Comparison(experiment, (experiment.algorithm,), (0, 1))
        with pytest.raises(PerfedError, match=r"round 1: .* the rounds before it are kept"):
            perfed.compare(comparison, folder, how=STACKED, side_by_side=True)
        assert len(list(folder.glob("*/checkpoint/manifest.json"))) == 2
        return
    with pytest.raises(PerfedError, match=r"round 1: .* the rounds before it are kept"):
        perfed.run(experiment, folder, how=STACKED)
    kept = perfed.Result(folder).directory.read_json("checkpoint/manifest.json")
    assert kept["next_round"] == 1
    assert kept["traffic"] == perfed.Result(folder).summary["traffic"]


def test_amounts_of_an_average() -> None:
    with pytest.raises(ConfigError, match="by amounts nan: each must be at least 0"):
        weighted_average([{}], [float("nan")])
