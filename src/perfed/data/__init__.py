"""Datasets, partitions, and each client's parts."""

import perfed.data.cifar  # noqa: F401  (registers its datasets)
from perfed.data.datasets import Dataset, Samples, datasets
from perfed.data.federation import ClientSplit, Federation, Split, build_federation
from perfed.data.partition import Partition, partitions

__all__ = [
    "ClientSplit",
    "Dataset",
    "Federation",
    "Partition",
    "Samples",
    "Split",
    "build_federation",
    "datasets",
    "partitions",
]
