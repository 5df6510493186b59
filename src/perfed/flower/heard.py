"""What the coordinator learns of each site from its answers alone, for the run's report.

A site keeps its labels and the cluster that it chose. The coordinator sees where its own clusters
put a site's answer and, with methods that send outputs on public samples, which classes the answer
names there. Both are in the round's line (``heard``), and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perfed.core.algorithm import Algorithm, Reply
from perfed.core.declaration import PROBABILITIES, Array, Entries
from perfed.core.tree import Tree

DECISIONS = Array(("P", "N"), PROBABILITIES)  # outputs on public samples, as they are declared
DIGITS = 4  # of a share


def heard(
    algorithm: Algorithm, declared: Entries, state: Tree, replies: Sequence[Reply]
) -> dict[str, Any]:
    """By client: ``cluster``, and ``classes``, the share of probability that each class has on
    average over the public set."""
    decisions = [name for name, entry in declared.items() if entry == DECISIONS]
    classes = {
        str(reply.client.id): _shares(reply, decisions[0])
        for reply in replies
        if decisions and decisions[0] in reply.message.arrays
    }
    cluster = {str(client): found for client, found in algorithm.placed(state, replies).items()}
    found = {"cluster": cluster, "classes": classes}
    return {name: by_client for name, by_client in found.items() if by_client}


def _shares(reply: Reply, name: str) -> list[float]:
    shares = reply.message[name].double().mean(0).tolist()
    return [round(share, DIGITS) for share in shares]
