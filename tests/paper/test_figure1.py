"""The linear-regression example: fixed points against the objective itself, and limits."""

import numpy as np
import pytest
import torch

from perfed.paper import figure1
from perfed.paper.figure1 import NOISE, SAMPLES, WEIGHT, example, models


@pytest.mark.parametrize("seed", range(5))
def test_without_clustering_every_model_minimises_its_objective(seed: int) -> None:
    """By automatic differentiation: at the fixed point the gradient of Φ_k is zero."""
    data = example(seed)
    found = torch.from_numpy(models(data, "without clustering", seed))
    public = torch.from_numpy(data.public)
    teacher = (found @ public.T).mean(0)
    for k in range(3):
        w = found[k].clone().requires_grad_()
        x, y = torch.from_numpy(data.x[k]), torch.from_numpy(data.y[k])
        objective = (x @ w - y).square().mean()
        objective = objective + WEIGHT * (teacher - public @ w).square().mean()
        (gradient,) = torch.autograd.grad(objective, w)
        assert float(gradient.norm()) < 1e-6


@pytest.mark.parametrize("seed", range(5))
def test_local_and_fedavg_are_least_squares(seed: int) -> None:
    data = example(seed)
    for k, found in enumerate(models(data, "local", seed)):
        expected = np.linalg.lstsq(data.x[k], data.y[k], rcond=None)[0]
        np.testing.assert_allclose(found, expected, atol=1e-9)
    pooled = np.linalg.lstsq(data.x.reshape(-1, 2), data.y.reshape(-1), rcond=None)[0]
    np.testing.assert_allclose(models(data, "FedAvg", seed)[0], pooled, atol=1e-9)


def test_clusters_help_the_two_that_are_alike_and_leave_the_third_alone() -> None:
    result = figure1.figure1(quick=True)
    far, near, local = (
        np.array(result["median_distance"][m]) for m in ("without clustering", "clustered", "local")
    )
    assert (near < 0.2 * far).all()
    assert near[2] == pytest.approx(local[2])  # alone in its cluster
    # Least squares: deviation NOISE/√(n·E[x²]) in each of two directions.
    assert local[0] == pytest.approx(NOISE * np.sqrt(2 / (SAMPLES * 100 / 3)), rel=0.5)
    assert [row[0] for row in figure1.tables(result)[0].rows] == list(figure1.METHODS)
    assert len(figure1.plot(result).axes) == 4
