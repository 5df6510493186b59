"""Which cluster every client was in, and which cluster of one round is which of the next."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from perfed.report.gather import Run


@dataclasses.dataclass(frozen=True)
class Membership:
    """Clusters are numbered from 0, the one chosen most often first."""

    rounds: int
    count: int
    chosen: dict[int, dict[int, int]]
    """Of each client, the cluster it chose in the rounds in which it was selected."""
    order: list[int]
    """Clients, those of a cluster together."""
    ids: dict[int, list[int]]
    """Which clusters a round's centroids are, where the server forms them anew each round."""
    overlaps: dict[int, list[list[float]]]
    """How alike the centroids formed at the end of a round were."""
    networks: int
    by_server: bool = False
    """Whether it is the server that put clients there: what they chose stays at their sites."""

    @property
    def traced(self) -> bool:
        return bool(self.ids)

    def returns(self) -> tuple[int, int]:
        """In the second half: how often a client came back, and how often to its last cluster."""
        again = same = 0
        for choices in self.chosen.values():
            selected = sorted(choices)
            for earlier, later in pairwise(selected):
                if later >= self.rounds / 2:
                    again += 1
                    same += choices[earlier] == choices[later]
        return again, same


def membership(run: Run) -> Membership | None:
    """None where no cluster is recorded, as in most methods."""
    recorded = _chosen(run)
    by_server = not recorded
    recorded = recorded or _heard(run)
    if not recorded:
        return None
    ids, overlaps = _traced(run)
    # A client chooses among the centroids that the server has formed before, and the server puts it
    # to one of those that it has formed with it.
    formed = 1 if by_server else 0
    choices: dict[int, dict[int, int]] = {client: {} for client in range(len(run.clients))}
    for round, clusters in recorded.items():
        for client, cluster in clusters.items():
            choices[client][round] = ids[round + formed][cluster] if ids else cluster
    often = Counter(cluster for chosen in choices.values() for cluster in chosen.values())
    known = {cluster for those in ids.values() for cluster in those} | set(often)
    names = {old: new for new, old in enumerate(sorted(known, key=lambda c: (-often[c], c)))}
    chosen = {
        client: {round: names[cluster] for round, cluster in those.items()}
        for client, those in choices.items()
    }
    networks = [client["architecture"] if client else "" for client in run.clients]
    by_network = not ids and len(set(networks)) > 1
    order = sorted(chosen, key=lambda c: (networks[c] if by_network else "", _usual(chosen[c]), c))
    return Membership(
        rounds=max(recorded) + 1,
        count=len(names),
        chosen=chosen,
        order=order,
        ids={round: [names[cluster] for cluster in those] for round, those in ids.items()},
        overlaps=overlaps,
        networks=len(set(networks)),
        by_server=by_server,
    )


def _chosen(run: Run) -> dict[int, dict[int, int]]:
    """By round and place: the cluster that each selected client chose, in a simulation."""
    places = {number: place for place, number in enumerate(run.numbers)}
    return {
        line["round"]: {
            places[client]: int(cluster)
            for client, cluster in zip(
                line["clients"], line["client_state"]["cluster"], strict=True
            )
            if client in places
        }
        for line in run.rounds
        if "cluster" in line.get("client_state", {})
    }


def _heard(run: Run) -> dict[int, dict[int, int]]:
    """By round and client: the cluster in which the coordinator of a federation saw it."""
    return {
        line["round"]: {int(client): int(c) for client, c in line["heard"]["cluster"].items()}
        for line in run.rounds
        if "cluster" in line.get("heard", {})
    }


def _traced(run: Run) -> tuple[dict[int, list[int]], dict[int, list[list[float]]]]:
    """By round: which cluster each centroid that clients chose from is; by round: how alike those
    formed at its end were. A centroid is the cluster of the one before that it is most like."""
    from scipy.optimize import linear_sum_assignment

    ids: dict[int, list[int]] = {}
    overlaps = {}
    now: list[int] = []
    for line in run.lines:
        if line["round"] >= 0 and now:
            ids[line["round"]] = now
        said = line.get("server_state", {})
        if "earlier_overlap" not in said:
            continue
        alike = np.array(said["earlier_overlap"])
        earlier = now or list(range(len(alike)))
        new: list[int | None] = [None] * alike.shape[1]
        for old, place in zip(*linear_sum_assignment(-alike), strict=True):
            new[place] = earlier[old]
        now = _completed(new)
        overlaps[line["round"]] = said["centroid_overlap"]
        ids[line["round"] + 1] = now
    return ids, overlaps


def _completed(ids: Sequence[int | None]) -> list[int]:
    """A centroid more than before gets the lowest number that is free."""
    free = (n for n in range(len(ids) + max([i or 0 for i in ids], default=0) + 1) if n not in ids)
    return [next(free) if number is None else number for number in ids]


def _usual(choices: dict[int, int]) -> int:
    """The cluster chosen most often in the later half of a client's draws; none comes last."""
    later = [choices[round] for round in sorted(choices)[len(choices) // 2 :]]
    return Counter(later).most_common(1)[0][0] if later else len(choices) + 1_000_000


def letter(cluster: int) -> str:
    """A, B, … Z, then a, b, …"""
    return chr(ord("A") + cluster) if cluster < 26 else chr(ord("a") + (cluster - 26) % 26)
