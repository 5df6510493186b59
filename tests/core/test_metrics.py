import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import perfed
from perfed.core.errors import ConfigError
from perfed.core.metrics import (
    Samples,
    check_range,
    column_metrics,
    evaluate,
    metric,
    metrics,
    summarize,
)
from perfed.core.selection import select_clients
from perfed.engines import Execution
from perfed.report.trackers import scalars
from perfed.runs.simulation import Simulation
from tests.conftest import without_checksums


@pytest.fixture(autouse=True)
def only_built_in() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(metrics)
    yield
    metrics.clear()
    metrics.update(before)


def value(name: str, logits: Tensor, labels: Tensor) -> float:
    return evaluate(Samples(logits, labels, [len(labels)]))[name].item()


def plain_balanced_accuracy(logits: np.ndarray, labels: np.ndarray) -> float:
    guess = logits.argmax(1)
    return float(np.mean([np.mean(guess[labels == c] == c) for c in np.unique(labels)]))


def plain_calibration_error(logits: np.ndarray, labels: np.ndarray) -> float:
    odds = np.exp(logits - logits.max(1, keepdims=True))
    confidence = (odds / odds.sum(1, keepdims=True)).max(1)
    right = logits.argmax(1) == labels
    error = 0.0
    for number in range(15):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        if inside.any():
            gap = abs(right[inside].mean() - confidence[inside].mean())
            error += inside.mean() * gap
    return error


PLAIN = {
    "accuracy": lambda logits, labels: (logits.argmax(1) == labels).mean(),
    "loss": lambda z, y: np.mean(np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]),
    "balanced_accuracy": plain_balanced_accuracy,
    "calibration_error": plain_calibration_error,
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_metric_is_what_a_few_lines_of_numpy_give(name: str) -> None:
    random = torch.Generator().manual_seed(1)
    sizes = [1, 7, 60, 400]
    logits = 3 * torch.randn(sum(sizes), 5, generator=random, dtype=torch.double)
    skewed = (5 * torch.rand(sum(sizes), generator=random) ** 3).long()
    found = evaluate(Samples(logits, skewed, sizes))[name]
    expected = [
        PLAIN[name](z.numpy(), y.numpy())
        for z, y in zip(logits.split(sizes), skewed.split(sizes), strict=True)
    ]
    assert found.numpy() == pytest.approx(np.array(expected), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_limit_cases_of_the_metrics(dtype: torch.dtype) -> None:
    labels = torch.tensor([0, 0, 0, 1])
    perfect = 1000 * torch.nn.functional.one_hot(labels, 3).to(dtype)
    assert value("balanced_accuracy", perfect, labels) == 1
    assert value("calibration_error", perfect, labels) == 0
    wrong = perfect.roll(1, 1)  # sure of a class that is never right
    assert value("accuracy", wrong, labels) == value("balanced_accuracy", wrong, labels) == 0
    assert value("calibration_error", wrong, labels) == pytest.approx(1)
    constant = torch.tensor([1000.0, 0, 0], dtype=dtype).expand(4, -1)
    assert value("accuracy", constant, labels) == 0.75
    assert value("balanced_accuracy", constant, labels) == 0.5
    assert value("calibration_error", constant, labels) == pytest.approx(0.25)
    even = torch.zeros(3, 3, dtype=dtype)  # says a third, and is right in a third
    assert value("calibration_error", even, torch.arange(3)) == pytest.approx(0, abs=1e-6)
    one_class = torch.tensor([[1.0, 0], [0, 1.0]], dtype=dtype)
    assert value("balanced_accuracy", one_class, torch.tensor([1, 1])) == 0.5


def test_a_diverged_model_does_not_break_a_metric() -> None:
    logits = torch.full((3, 4), torch.nan)
    assert np.isnan(value("loss", logits, torch.tensor([0, 1, 2])))


def test_metrics_are_registered_once_and_stay_within_their_range() -> None:
    def other(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.sum()

    register = metric("accuracy", lowest=0, highest=1, better="higher", shown="percent")
    with pytest.raises(ValueError, match="metric 'accuracy' is registered already"):
        register(other)
    metric("sum", lowest=0, highest=2, better="higher", shown="number")(other)
    check_range({"test_sum": np.array([0.0, 2.0 + 1e-9])})
    for wrong in (2.1, -1.0, np.nan):
        with pytest.raises(ConfigError, match=r"metric sum: gave .*: must be from 0 to 2"):
            check_range({"test_sum": np.array([1.0, wrong])})
    shown = [metrics["accuracy"].text(0.5), metrics["loss"].text(0.5)]
    assert shown == ["50.0 %", "0.500"]
    assert metrics["loss"].about == "Mean cross-entropy."
    assert next(iter(column_metrics())) == "validation_accuracy"


OWN = """
    from perfed.core.metrics import metric


    @metric("top2_accuracy", lowest=0, highest=1, better="higher", shown="percent")
    def top2(logits, labels):
        \"\"\"Share of samples whose label is among the two most probable classes.\"\"\"
        return (logits.topk(2).indices == labels[:, None]).any(1).double().mean()
"""


@pytest.mark.parametrize("engine", ["sequential", "stacked", "ray"])
def test_a_metric_of_a_users_own_is_one_file(engine: str, tmp_path: Path) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    (tmp_path / "own_metric.py").write_text(textwrap.dedent(OWN))
    values = {"rounds": 2, "clients": 4, "clients_per_round": 3, "models": "mlp"}
    values["metrics"] = [f"{tmp_path}/own_metric.py:top2"]
    experiment = perfed.config.parse(values)
    how = Execution(engine=engine, device="cpu")
    result = perfed.run(experiment, tmp_path / "run", how=how)
    frame = result.per_client()
    assert (frame["test_top2_accuracy"] >= frame["test_accuracy"]).all()
    assert "validation_top2_accuracy" in frame
    last = result.summary["models"]["personal"]["last"]
    mean = frame[frame["round"] == 1]["test_top2_accuracy"].mean()
    assert last["test_top2_accuracy"] == pytest.approx(mean)
    assert "test_top2_accuracy" in result.per_round()


def test_a_metric_that_is_none_is_said() -> None:
    with pytest.raises(ConfigError, match=r"metrics\[0\]: 'math:sqrt' is not a metric"):
        Simulation(perfed.Experiment(metrics=("math:sqrt",)))


def test_runs_from_before_a_metric_are_read_without_it(tmp_path: Path) -> None:
    experiment = perfed.Experiment(rounds=3, clients=4, clients_per_round=3, models="mlp")
    result = perfed.run(experiment, tmp_path / "run")
    whole = result.per_client()
    without_checksums(result.path)
    for file in ("rounds.jsonl", "clients.jsonl", "summary.json"):
        path = tmp_path / "run" / file
        lines = (
            [json.loads(line) for line in path.read_text().splitlines() or ()]
            if (file.endswith("jsonl"))
            else [json.loads(path.read_text())]
        )
        path.write_text("".join(json.dumps(without_new(line)) + "\n" for line in lines))
    old = perfed.Result(tmp_path / "run")
    new = [name for name in whole if "balanced" in name or "calibration" in name]
    assert len(new) == 4
    assert old.per_client().equals(whole.drop(columns=new))
    assert not set(new) & set(old.per_round())
    assert old.table() == result.table()
    assert old.report().is_file()
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[-1])
    assert "accuracy/test" in scalars(line["evaluation"], line["traffic_total"])


def without_new(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {
        key: without_new(inner)
        for key, inner in value.items()
        if "balanced" not in key and "calibration" not in key
    }


def test_summaries_say_over_whom_they_average() -> None:
    accuracy = np.array([0.0, 1.0, 0.5, 0.5])
    columns = {
        "test_accuracy": accuracy,
        "test_loss": accuracy,
        "validation_accuracy": 1 - accuracy,
        "validation_loss": accuracy,
    }
    summary = summarize(
        columns,
        train_sizes=np.array([1, 9, 10, 1000]),
        weights=np.array([1, 1, 1, 7]),
        selected=np.array([False, True, True, False]),
    )
    assert summary["test_accuracy"] == 0.5
    assert summary["test_accuracy_selected"] == 0.75
    assert summary["test_accuracy_weighted"] == pytest.approx((1 + 0.5 + 3.5) / 10)
    assert summary["test_accuracy_worst_decile"] == 0.0
    assert summary["test_accuracy_by_train_size"] == {"1-9": 0.5, "10-99": 0.5, "1000+": 0.5}
    nobody = summarize(columns, np.ones(4), np.ones(4), np.zeros(4, dtype=bool))
    assert nobody["test_accuracy_selected"] is None


@pytest.mark.parametrize(("clients", "worst"), [(9, 0.0), (19, 0.0), (20, 0.5), (30, 1.0)])
def test_the_worst_decile_is_a_tenth_of_the_clients(clients: int, worst: float) -> None:
    """Rounded down, and at least one."""
    columns = {"test_accuracy": np.arange(clients)[::-1].astype(float)}
    ones = np.ones(clients)
    found = summarize(columns, ones, ones, ones > 0)["test_accuracy_worst_decile"]
    assert found == worst


def test_selection_is_without_replacement_and_by_size() -> None:
    sizes = np.array([1, 1, 8])
    draws = [select_clients(sizes, 2, True, 0, round) for round in range(4000)]
    assert all(len(set(drawn)) == 2 for drawn in draws)
    # P(client 2 is left out) = P(0 then 1) + P(1 then 0) = 2 · 1/10 · 1/9
    assert np.mean([2 not in drawn for drawn in draws]) == pytest.approx(2 / 90, abs=0.008)
    uniform = [select_clients(sizes, 1, False, 0, round)[0] for round in range(3000)]
    assert np.bincount(uniform) == pytest.approx([1000] * 3, abs=110)
