"""COMET (Cho et al. 2023): the journal version of PerFed-CKT, as far as it can be established.

Cho, Wang, Chiruvolu, Joshi: *Communication-Efficient and Model-Heterogeneous Personalized Federated
Learning via Clustered Knowledge Transfer*, IEEE Journal of Selected Topics in Signal Processing
17(1), 2023. Its abstract describes clustered co-distillation: clients with networks of their own
send what these say on public samples, and learn from clients with similar data.

What differs from ``perfed-ckt``: nothing here but the name. The journal's text was not at hand when
this was written, only its title, its abstract and what others say of it. None of that shows a
difference in the procedure. So this is PerFed-CKT's Algorithm 1 with its defaults, and gives the
same numbers. If the journal's algorithm has another step, that step is missing.

What others call COMET is something else, and is not this:

- Code beside SCARLET's clusters clients anew for each public *sample*; a client takes the nearest
  centroid of each sample, and distils by KL divergence before it trains.
- Code beside COSMOS's sends each client the mean of its own cluster, and the client distils by KL
  divergence before it trains.
"""

from __future__ import annotations

from dataclasses import dataclass

from perfed.algorithms.perfed_ckt import PerFedCKT
from perfed.core.algorithm import algorithms


@algorithms.register("comet")
@dataclass(frozen=True)
class Comet(PerFedCKT):
    pass
