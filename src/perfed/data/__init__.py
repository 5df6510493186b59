"""Datasets, partitions, and each client's parts."""

import perfed.data.cifar
import perfed.data.files
import perfed.data.generated
import perfed.data.huggingface
import perfed.data.many
import perfed.data.pytorch
import perfed.data.tables  # noqa: F401  (these register their datasets)
from perfed.data.datasets import ClientData, Dataset, Samples, datasets
from perfed.data.federation import ClientSplit, Federation, Split, build_federation
from perfed.data.partition import Partition, partitions
from perfed.data.shift import Shift, shifts

__all__ = [
    "ClientData",
    "ClientSplit",
    "Dataset",
    "Federation",
    "Partition",
    "Samples",
    "Shift",
    "Split",
    "build_federation",
    "datasets",
    "partitions",
    "shifts",
]
