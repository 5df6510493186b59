"""One file per algorithm; importing this package registers them all."""

from perfed.algorithms.fedavg import FedAvg
from perfed.algorithms.local import Local
from perfed.algorithms.majority import Majority
from perfed.algorithms.perfed_ckt import PerFedCKT

__all__ = ["FedAvg", "Local", "Majority", "PerFedCKT"]
