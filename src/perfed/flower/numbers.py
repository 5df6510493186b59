"""How sites evaluate their models: the numbers they tell, checked, and put side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from perfed.core.metrics import EVALUATED_ON, MODEL_KINDS, column_metrics, column_name
from perfed.flower.protocol import Refused

Numbers = dict[str, dict[str, float]]  # by model kind and name: personal → test_accuracy → 0.9
NEEDED = [column_name(part, name) for part in EVALUATED_ON for name in ("accuracy", "loss")]
"""What every site must tell of its models. Of other metrics, it tells those that it knows."""


def checked_numbers(facts: Mapping[str, Any]) -> Numbers:
    """How a site evaluates its models; raises Refused where these are not numbers."""
    known = column_metrics()
    try:
        said = dict(facts["numbers"])
        numbers = {
            kind: {n: float(said[kind][n]) for n in known if n in NEEDED or n in said[kind]}
            for kind in said
        }
    except (KeyError, TypeError, ValueError, OverflowError):
        raise Refused("its evaluation has a number that is missing or out of range") from None
    possible = all(known[name].possible(one[name]) for one in numbers.values() for name in one)
    if not numbers or not numbers.keys() <= set(MODEL_KINDS) or not possible:
        raise Refused("its evaluation has a number that is missing or out of range")
    return numbers


def alike(numbers: Mapping[int, Numbers]) -> dict[int, Numbers]:
    """Without those who evaluate other kinds of models than most do."""
    kinds = Counter(tuple(sorted(evaluated)) for evaluated in numbers.values())
    usual = kinds.most_common(1)[0][0] if kinds else ()
    return {k: evaluated for k, evaluated in numbers.items() if tuple(sorted(evaluated)) == usual}


def known_to_all(numbers: Mapping[int, Numbers], kind: str) -> list[str]:
    """The metrics that every client told: means over some clients would not be comparable."""
    return [
        n for n in column_metrics() if all(n in evaluated[kind] for evaluated in numbers.values())
    ]


def numbers_in(line: Mapping[str, Any], clients: int) -> dict[int, Numbers]:
    """The numbers of each client, from a line of an evaluation."""
    evaluated = {kind: columns for kind, columns in line.items() if kind != "round"}
    return {
        client: {
            kind: {n: values[client] for n, values in columns.items() if values[client] is not None}
            for kind, columns in evaluated.items()
        }
        for client in range(clients)
        if all(
            columns[name][client] is not None for columns in evaluated.values() for name in NEEDED
        )
    }


def columns_of(numbers: Mapping[int, Numbers], clients: Sequence[int]) -> dict[str, dict[str, Any]]:
    """What a line of an evaluation holds: a place for every client. Those of whom nothing is known
    have no number."""
    one = next(iter(numbers.values()))
    return {
        kind: {
            name: [
                numbers[client][kind].get(name) if client in numbers else None for client in clients
            ]
            for name in column_metrics()
            if any(name in told[kind] for told in numbers.values())
        }
        for kind in one
    }


def arrays_of(numbers: Mapping[int, Numbers], clients: Sequence[int]) -> dict[str, dict[str, Any]]:
    """By model kind and metric, one number for each of these clients, all of whom told theirs."""
    return {
        kind: {
            name: np.array([numbers[client][kind][name] for client in clients])
            for name in known_to_all(numbers, kind)
        }
        for kind in numbers[clients[0]]
    }
