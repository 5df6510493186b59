"""Who takes part in a round."""

from __future__ import annotations

import numpy as np

from perfed.core.streams import numpy_stream


def select_clients(
    sizes: np.ndarray, count: int, by_size: bool, seed: int, round: int
) -> list[int]:
    """``count`` distinct clients, selected one after another with p_k ∝ size (or uniformly)."""
    chances = sizes / sizes.sum() if by_size else None
    selected = numpy_stream(seed, "selection", round=round).choice(
        len(sizes), size=count, replace=False, p=chances
    )
    return sorted(int(client) for client in selected)


def counted(samples: int, by_size: bool, drawn: int, clients: int) -> float:
    """How much a client counts in a mean over ``drawn`` of ``clients``, so that its size counts
    once: in the draw, or else in the mean. Where all take part nothing is drawn."""
    return 1.0 if by_size and drawn < clients else float(samples)


def evaluated_clients(clients: int, count: int, seed: int) -> list[int]:
    """Of ``clients``, the ``count`` that are evaluated, or all of them: the same in every round."""
    if not count:
        return list(range(clients))
    return sorted(
        int(client)
        for client in numpy_stream(seed, "evaluated").choice(clients, size=count, replace=False)
    )
