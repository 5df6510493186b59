"""One file per algorithm; importing this package registers them all."""

import perfed.algorithms.robust  # noqa: F401  (registers its stages)
from perfed.algorithms.apfl import APFL
from perfed.algorithms.cfd import CFD
from perfed.algorithms.comet import Comet
from perfed.algorithms.cosmos import Cosmos
from perfed.algorithms.ditto import Ditto
from perfed.algorithms.ds_fl import DSFL
from perfed.algorithms.fd import FD
from perfed.algorithms.fedavg import FedAvg
from perfed.algorithms.fedavg_ft import FedAvgFT
from perfed.algorithms.feddf import FedDF
from perfed.algorithms.fedfomo import FedFomo
from perfed.algorithms.fedgen import FedGen
from perfed.algorithms.fedgh import FedGH
from perfed.algorithms.fedkd import FedKD
from perfed.algorithms.fedmd import FedMD
from perfed.algorithms.fedmrl import FedMRL
from perfed.algorithms.fedper import FedPer
from perfed.algorithms.fedproto import FedProto
from perfed.algorithms.fedprox import FedProx
from perfed.algorithms.fedrep import FedRep
from perfed.algorithms.fedtgp import FedTGP
from perfed.algorithms.fml import FML
from perfed.algorithms.hypcluster import HypCluster
from perfed.algorithms.kt_pfl import KTpFL
from perfed.algorithms.lg_fedavg import LGFedAvg
from perfed.algorithms.local import Local
from perfed.algorithms.majority import Majority
from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.algorithms.perfed_evidence import PerFedEvidence
from perfed.algorithms.perfed_kin import PerFedKin
from perfed.algorithms.perfedavg import PerFedAvg
from perfed.algorithms.pfedme import PFedMe
from perfed.algorithms.scaffold import Scaffold
from perfed.algorithms.scarlet import Scarlet
from perfed.algorithms.selective_fd import SelectiveFD

__all__ = [
    "APFL",
    "CFD",
    "DSFL",
    "FD",
    "FML",
    "Comet",
    "Cosmos",
    "Ditto",
    "FedAvg",
    "FedAvgFT",
    "FedDF",
    "FedFomo",
    "FedGH",
    "FedGen",
    "FedKD",
    "FedMD",
    "FedMRL",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedTGP",
    "HypCluster",
    "KTpFL",
    "LGFedAvg",
    "Local",
    "Majority",
    "PFedMe",
    "PerFedAvg",
    "PerFedCKT",
    "PerFedEvidence",
    "PerFedKin",
    "Scaffold",
    "Scarlet",
    "SelectiveFD",
]
