"""c-means clustering of soft decisions, as the server does it, and the nearest centroid, as a
client finds it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

STARTS = 10  # k-means++ starts; the one with the lowest inertia wins


def cmeans(matrices: Tensor, clusters: int, random: np.random.Generator) -> Tensor:
    """The centroids (≤ c, |P|, N) of ``matrices`` (m, |P|, N).

    Where no more than c *distinct* matrices arrive, those are the centroids: each is a cluster of
    its own, and fewer than c are returned rather than one twice.
    """
    points = matrices.flatten(1).double().cpu().numpy()
    distinct = np.unique(points, axis=0)
    if len(distinct) <= clusters:
        centroids = distinct
    elif clusters == 1:
        centroids = points.mean(axis=0, keepdims=True)
    else:
        from sklearn.cluster import KMeans

        centroids = (
            KMeans(clusters, n_init=STARTS, random_state=int(random.integers(2**31)))
            .fit(points)
            .cluster_centers_
        )
    shape = (len(centroids), *matrices.shape[1:])
    return torch.from_numpy(centroids).to(matrices).reshape(shape)


def nearest(centroids: Tensor, own: Tensor) -> Tensor:
    """Index of the centroid nearest to ``own`` in squared ℓ2 (the first, where several are)."""
    return (centroids - own).square().flatten(1).sum(1).argmin()
