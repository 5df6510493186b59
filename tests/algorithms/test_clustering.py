from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from perfed.algorithms.clustering import (
    cluster,
    cmeans,
    cmeans_of_each,
    few_axes,
    nearest,
    nearest_of_each,
)


def inertia(points: torch.Tensor, centroids: torch.Tensor) -> float:
    return float(torch.cdist(points.flatten(1), centroids.flatten(1)).min(1).values.square().sum())


def best_inertia(points: torch.Tensor, clusters: int) -> float:
    """Over all assignments: exact, for a few points."""
    flat, best = points.flatten(1), np.inf
    for assignment in product(range(clusters), repeat=len(flat)):
        groups = [flat[torch.tensor(assignment) == c] for c in range(clusters)]
        best = min(best, sum(float((g - g.mean(0)).square().sum()) for g in groups if len(g)))
    return best


@pytest.mark.parametrize("seed", range(6))
def test_centroids_are_the_optimum_of_c_means(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(7, 3, 2, generator=generator, dtype=torch.float64)
    centroids = cmeans(points, 3, np.random.default_rng(seed))
    assert centroids.shape == (3, 3, 2)
    assert inertia(points, centroids) == pytest.approx(best_inertia(points, 3), rel=1e-9)


@given(st.integers(0, 10**6), st.integers(5, 20), st.integers(2, 5))
def test_clusters_are_about_as_good_as_a_librarys(seed: int, points: int, clusters: int) -> None:
    random = np.random.default_rng(seed)
    centers = 3 * random.normal(size=(clusters, 40))
    cloud = random.normal(size=(points, 40)) + centers[random.integers(0, clusters, points)]
    ours = inertia(*map(torch.from_numpy, (cloud, centroids_of(cloud, clusters, random))))
    theirs = KMeans(clusters, n_init=10, random_state=0).fit(cloud).inertia_
    assert ours <= 1.15 * theirs


def centroids_of(points: np.ndarray, clusters: int, random: np.random.Generator) -> np.ndarray:
    labels = cluster(few_axes(points), clusters, random)
    assert set(labels) == set(range(clusters))  # none is empty
    return np.stack([points[labels == c].mean(axis=0) for c in range(clusters)])


def test_few_axes_keep_distances() -> None:
    points = np.random.default_rng(0).normal(size=(7, 300))
    few = few_axes(points)
    assert few.shape == (7, 7)
    both = [np.linalg.norm(p[:, None] - p, axis=2) for p in (points, few)]
    np.testing.assert_allclose(*both, atol=1e-9)


def test_one_cluster_is_the_mean_and_m_clusters_are_the_matrices() -> None:
    points = torch.rand(5, 4, 3, dtype=torch.float64)
    random = np.random.default_rng(0)
    assert torch.allclose(cmeans(points, 1, random)[0], points.mean(0), atol=1e-15)
    each = cmeans(points, 5, random)
    assert {tuple(m.flatten().tolist()) for m in each} == {
        tuple(m.flatten().tolist()) for m in points
    }


@pytest.mark.filterwarnings("error")
def test_fewer_distinct_matrices_than_clusters_are_each_sent_once() -> None:
    a, b = torch.rand(2, 4, 3)
    centroids = cmeans(torch.stack([a, b, a, a]), 3, np.random.default_rng(0))
    assert len(centroids) == 2
    assert sorted(map(float, centroids.sum((1, 2)))) == sorted(map(float, (a.sum(), b.sum())))


def test_nearest_is_by_squared_distance_and_the_first_of_equals() -> None:
    centroids = torch.tensor([[[0.0, 0.0]], [[3.0, 0.0]], [[3.0, 0.0]]])
    assert int(nearest(centroids, torch.tensor([[1.4, 0.0]]))) == 0
    assert int(nearest(centroids, torch.tensor([[1.6, 0.0]]))) == 1


# Each public sample by itself.


@pytest.mark.parametrize("seed", range(4))
def test_centroids_of_each_sample_are_the_optimum_there(seed: int) -> None:
    answers = torch.rand(6, 5, 3, generator=torch.Generator().manual_seed(seed)).double()
    centroids = cmeans_of_each(answers, 3, np.random.default_rng(seed))
    assert centroids.shape == (3, 5, 3)
    for sample in range(5):
        best = best_inertia(answers[:, sample], 3)
        assert inertia(answers[:, sample], centroids[:, sample]) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_clusters_of_each_sample_are_about_as_good_as_a_librarys(seed: int) -> None:
    """Together: of one sample either may have found the better of two local optima."""
    random = np.random.default_rng(seed)
    answers = random.dirichlet([0.3] * 8, size=(13, 40))
    centroids = cmeans_of_each(torch.from_numpy(answers), 4, random)
    ours = sum(inertia(torch.from_numpy(answers[:, n]), centroids[:, n]) for n in range(40))
    theirs = sum(
        KMeans(4, n_init=10, random_state=0).fit(answers[:, n]).inertia_ for n in range(40)
    )
    assert ours <= 1.03 * theirs


def test_clients_that_all_say_the_same_are_one_place_several_times() -> None:
    answers = torch.full((5, 2, 4), 0.25)
    assert torch.equal(cmeans_of_each(answers, 2, np.random.default_rng(0)), answers[:2])
    few = torch.rand(2, 3, 4)
    assert cmeans_of_each(few, 3, np.random.default_rng(0)) is few  # no more than there are


def test_the_nearest_centroid_of_each_sample() -> None:
    centroids = torch.tensor([[[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9], [1.0, 0.0]]])
    own = torch.tensor([[0.2, 0.8], [0.4, 0.6]])
    assert torch.equal(nearest_of_each(centroids, own), torch.tensor([[0.1, 0.9], [0.5, 0.5]]))


def test_points_that_are_nearly_one_end_too() -> None:
    """Rounding decides there which cluster is nearer, and may decide otherwise each time."""
    apart = torch.tensor([[[1 / 3]], [[1 / 3 + 3e-9]], [[1 / 3 - 3e-9]]], dtype=torch.double)
    found = cmeans_of_each(apart, 2, np.random.default_rng(0))
    assert torch.allclose(found, torch.full((2, 1, 1), 1 / 3, dtype=torch.double), atol=1e-8)
    logits = torch.randn(8, 300, 10, generator=torch.Generator().manual_seed(0))
    logits[..., 0] += 20
    sure = cmeans_of_each(logits.softmax(2), 3, np.random.default_rng(0))
    assert torch.allclose(sure.sum(2), torch.ones(3, 300), atol=1e-5)
