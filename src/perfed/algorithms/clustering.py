"""c-means clustering of soft decisions, as the server does it, and the nearest centroid, as a
client finds it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from perfed.core.errors import ConfigError

STARTS = 10  # k-means++ starts; the one with the lowest inertia wins
DIGITS = 10  # of a probability
MOST_MOVES = 100  # of points between clusters, where many clusterings are made at once
TRIALS = 3  # points tried for each centroid of a start


def cmeans(matrices: Tensor, clusters: int, random: np.random.Generator) -> Tensor:
    """The centroids (≤ c, |P|, N) of ``matrices`` (m, |P|, N).

    Where no more than c *distinct* matrices arrive, those are the centroids: each is a cluster of
    its own, and fewer than c are returned rather than one twice.
    """
    points = matrices.flatten(1).double().cpu().numpy()
    distinct = {point.tobytes(): point for point in points}
    if len(distinct) <= clusters:
        centroids = np.stack(list(distinct.values()))
    elif clusters == 1:
        centroids = points.mean(axis=0, keepdims=True)
    else:
        labels = cluster(few_axes(points), clusters, random)
        centroids = np.stack([points[labels == c].mean(axis=0) for c in range(clusters)])
    shape = (len(centroids), *matrices.shape[1:])
    return torch.from_numpy(centroids).to(matrices).reshape(shape)


def in_the_order_of(earlier: Tensor, centroids: Tensor) -> Tensor:
    """The centroids, each at the place of the earlier one that it is nearest to, the nearest pair
    first: so a number stands for one cluster as long as there is one."""
    if earlier.shape != centroids.shape:
        return centroids
    distances = (earlier[:, None] - centroids).square().flatten(2).sum(2).double().cpu()
    place = [0] * len(centroids)
    for _ in place:
        row, column = divmod(int(distances.argmin()), len(centroids))
        place[row] = column
        distances[row], distances[:, column] = torch.inf, torch.inf
    return centroids[place]


def few_axes(points: np.ndarray) -> np.ndarray:
    """The m points in m coordinates, at the same distances from each other.

    Distances are all that c-means looks at, and m is ten where |P|·N is twenty thousand.
    """
    centered = points - points.mean(axis=0)
    values, vectors = np.linalg.eigh(centered @ centered.T)
    result: np.ndarray = vectors * np.sqrt(np.clip(values, 0, None))
    return result


def cluster(points: np.ndarray, clusters: int, random: np.random.Generator) -> np.ndarray:
    """Each point's cluster: the best of several k-means++ starts. None is empty."""
    results = [_lloyd(points, _start(points, clusters, random)) for _ in range(STARTS)]
    labels: np.ndarray = min(results, key=lambda result: result[0])[1]
    return labels


def _start(points: np.ndarray, clusters: int, random: np.random.Generator) -> np.ndarray:
    """Greedy k-means++: of a few points drawn by their squared distance to the centroids chosen
    so far, the one that brings the points nearest."""
    squared = np.square(points[:, None] - points).sum(axis=2)
    chosen = [int(random.integers(len(points)))]
    while len(chosen) < clusters:
        nearest = squared[chosen].min(axis=0)
        few = random.choice(len(points), TRIALS, p=nearest / nearest.sum())
        chosen.append(int(min(few, key=lambda n: np.minimum(nearest, squared[n]).sum())))
    return points[chosen]


def _lloyd(points: np.ndarray, centroids: np.ndarray) -> tuple[float, np.ndarray]:
    """Inertia and labels once no point changes its cluster any more."""
    labels = np.full(len(points), -1)
    while True:
        distances = np.square(points[:, None] - centroids).sum(axis=2)
        before, labels = labels, distances.argmin(axis=1)
        for empty in set(range(len(centroids))) - set(labels.tolist()):
            # The point farthest from its centroid, of a cluster that has others.
            own = distances[np.arange(len(points)), labels]
            alone = np.bincount(labels, minlength=len(centroids))[labels] == 1
            labels[np.where(alone, -1.0, own).argmax()] = empty
        if (labels == before).all():
            return float(distances[np.arange(len(points)), labels].sum()), labels
        centroids = np.stack([points[labels == c].mean(axis=0) for c in range(len(centroids))])


def check_clusters(clusters: int, clients_per_round: int) -> None:
    if clusters > clients_per_round:
        raise ConfigError(
            f"{clusters} clusters of {clients_per_round} clients: "
            f"must be at most clients_per_round, {clients_per_round}",
            "clusters",
        )


# The same for each public sample by itself: many small clusterings at once.


def cmeans_of_each(answers: Tensor, clusters: int, random: np.random.Generator) -> Tensor:
    """The centroids (≤ c, |P|, N) of ``answers`` (m, |P|, N), sample by sample."""
    if len(answers) <= clusters:
        return answers
    # Rounded: what engines differ in must not decide between two clusters that are as good.
    points = answers.double().cpu().numpy().swapaxes(0, 1).round(DIGITS)
    best, least = _centroids_of_each(points, clusters, random)
    for _ in range(STARTS - 1):
        centroids, inertia = _centroids_of_each(points, clusters, random)
        better = inertia < least - 10.0**-DIGITS
        best = np.where(better[:, None, None], centroids, best)
        least = np.where(better, inertia, least)
    return torch.from_numpy(best.swapaxes(0, 1).copy()).to(answers)


def _centroids_of_each(
    points: np.ndarray, clusters: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """One start: centroids (|P|, c, N) of points (|P|, m, N), and their inertia."""
    centroids, labels = _start_of_each(points, clusters, random), None
    for _ in range(MOST_MOVES):  # points that are nearly one may change places for ever
        distances = _squared_distances(points, centroids)
        before, labels = labels, distances.argmin(2)
        if before is not None and (labels == before).all():
            break
        member = labels[..., None] == np.arange(clusters)
        counts = member.sum(1)[..., None]
        means = member.swapaxes(1, 2) @ points / np.maximum(counts, 1)
        centroids = np.where(counts > 0, means, centroids)  # where nobody is, it stays
    return centroids, _squared_distances(points, centroids).min(2).sum(1)


def _start_of_each(points: np.ndarray, clusters: int, random: np.random.Generator) -> np.ndarray:
    """Greedy k-means++, as above."""
    samples, everyone = np.arange(len(points)), points.shape[1]
    chosen = [points[samples, random.integers(everyone, size=len(points))]]
    while len(chosen) < clusters:
        far = _squared_distances(points, np.stack(chosen, 1)).min(2)
        chance = far + (far.max(1, keepdims=True) == 0)  # all in one place: any of them
        reached = chance.cumsum(1) / chance.sum(1, keepdims=True)
        drawn = (reached[:, None] < random.random((len(points), TRIALS, 1))).sum(2)
        few = points[samples[:, None], np.minimum(drawn, everyone - 1)]
        left = np.minimum(far[..., None], _squared_distances(points, few)).sum(1)
        chosen.append(few[samples, left.argmin(1)])
    return np.stack(chosen, 1)


def _squared_distances(points: np.ndarray, centroids: np.ndarray) -> np.ndarray:
    """Of each sample, from its points (|P|, m, N) to its centroids: (|P|, m, c)."""
    distances = np.square(points).sum(2)[..., None] + np.square(centroids).sum(2)[:, None]
    result: np.ndarray = np.clip(distances - 2 * points @ centroids.swapaxes(1, 2), 0, None)
    return result


def nearest_of_each(centroids: Tensor, own: Tensor) -> Tensor:
    """For each sample, the centroid nearest to ``own``, |P|×N (the first, where several are)."""
    place = (centroids - own).square().sum(2).argmin(0)
    return centroids[place, torch.arange(len(own), device=own.device)]


def nearest(centroids: Tensor, own: Tensor) -> Tensor:
    """Index of the centroid nearest to ``own`` in squared ℓ2 (the first, where several are)."""
    return (centroids - own).square().flatten(1).sum(1).argmin()


def overlap(some: Tensor, others: Tensor) -> Tensor:
    """How much of their probability two centroids give to the same classes, on average over the
    public set: 1 where they say the same, 0 where they have no class in common."""
    return torch.stack([torch.minimum(one, others).sum(2).mean(1) for one in some])
