"""One file per algorithm; importing this package registers them all."""

from perfed.algorithms.ditto import Ditto
from perfed.algorithms.fedavg import FedAvg
from perfed.algorithms.fedavg_ft import FedAvgFT
from perfed.algorithms.feddf import FedDF
from perfed.algorithms.fedfomo import FedFomo
from perfed.algorithms.fedgen import FedGen
from perfed.algorithms.fedkd import FedKD
from perfed.algorithms.fedmrl import FedMRL
from perfed.algorithms.fedprox import FedProx
from perfed.algorithms.fml import FML
from perfed.algorithms.hypcluster import HypCluster
from perfed.algorithms.local import Local
from perfed.algorithms.majority import Majority
from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.algorithms.perfed_evidence import PerFedEvidence
from perfed.algorithms.perfed_kin import PerFedKin
from perfed.algorithms.perfedavg import PerFedAvg
from perfed.algorithms.scaffold import Scaffold

__all__ = [
    "FML",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "FedDF",
    "FedFomo",
    "FedGen",
    "FedKD",
    "FedMRL",
    "FedProx",
    "HypCluster",
    "Local",
    "Majority",
    "PerFedAvg",
    "PerFedCKT",
    "PerFedEvidence",
    "PerFedKin",
    "Scaffold",
]
