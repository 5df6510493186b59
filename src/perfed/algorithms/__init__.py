"""One file per algorithm; importing this package registers them all."""

from perfed.algorithms.ditto import Ditto
from perfed.algorithms.fd import FD
from perfed.algorithms.fedavg import FedAvg
from perfed.algorithms.fedavg_ft import FedAvgFT
from perfed.algorithms.feddf import FedDF
from perfed.algorithms.fedfomo import FedFomo
from perfed.algorithms.fedgh import FedGH
from perfed.algorithms.fedproto import FedProto
from perfed.algorithms.fedprox import FedProx
from perfed.algorithms.fedtgp import FedTGP
from perfed.algorithms.hypcluster import HypCluster
from perfed.algorithms.lg_fedavg import LGFedAvg
from perfed.algorithms.local import Local
from perfed.algorithms.majority import Majority
from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.algorithms.perfed_evidence import PerFedEvidence
from perfed.algorithms.perfed_kin import PerFedKin
from perfed.algorithms.perfedavg import PerFedAvg
from perfed.algorithms.scaffold import Scaffold

__all__ = [
    "FD",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "FedDF",
    "FedFomo",
    "FedGH",
    "FedProto",
    "FedProx",
    "FedTGP",
    "HypCluster",
    "LGFedAvg",
    "Local",
    "Majority",
    "PerFedAvg",
    "PerFedCKT",
    "PerFedEvidence",
    "PerFedKin",
    "Scaffold",
]
