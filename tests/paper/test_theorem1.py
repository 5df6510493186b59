"""Theorem 1 on a small scale, and its gradient by hand, in NumPy."""

import numpy as np
import pytest
import torch

from perfed.core.channel import Channel
from perfed.engines import Execution
from perfed.paper import theorem1
from perfed.paper.theorem1 import CASES, experiment, gradient_norms
from perfed.runs.simulation import Simulation


@pytest.mark.usefixtures("float64")
def test_the_gradient_of_the_linear_model_by_hand() -> None:
    simulation = Simulation(experiment(CASES[0], 5), how=Execution(device="cpu"))
    channel = Channel()
    simulation.begin(channel)
    for round in range(5):
        simulation.play_round(round, channel)
    population = simulation.population
    centroids = simulation.progress.state["centroids"].numpy()
    public = with_one(population.public_x)
    for k, found in enumerate(gradient_norms(simulation)):
        params = population.records[k].weights.params
        w = np.column_stack([params["1.weight"].numpy(), params["1.bias"].numpy()])
        where = population.positions(k, "train")
        x, y = with_one(population.x[where]), np.eye(10)[population.y[where].numpy()]
        said = softmax(public @ w.T)
        teacher = min(centroids, key=lambda c: float(np.square(c - said).sum()))
        away = -2 * (teacher - said)
        back = said * (away - (away * said).sum(axis=1, keepdims=True))
        gradient = (softmax(x @ w.T) - y).T @ x / len(x) + 2.0 * back.T @ public / len(public)
        assert found == pytest.approx(np.linalg.norm(gradient), rel=1e-9)


def with_one(x: torch.Tensor) -> np.ndarray:
    return np.column_stack([x.flatten(1).numpy(), np.ones(len(x))])


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


@pytest.mark.long
def test_gradients_go_towards_zero() -> None:
    result = theorem1.theorem1(quick=True)
    assert result["rounds"][0] == 0
    assert result["rounds"][-1] == 300
    for title in (case.title for case in CASES if case.decay):
        largest = result["cases"][title]["largest"]
        assert largest[-1] < 0.1 * max(largest)
    assert [row[0] for row in theorem1.tables(result)[0].rows] == [case.title for case in CASES]
    assert len(theorem1.plot(result).axes[0].lines) == 2 * len(CASES)
