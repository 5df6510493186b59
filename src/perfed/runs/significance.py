"""Whether a difference is more than chance: intervals and tests that studies report.

A seed is what is repeated independently. With enough of them a test is over seeds. With the few
that studies can afford no test over seeds is possible; it is then over clients, each with its mean
over seeds, and says so. That takes clients for independent. They are not quite, since they learn
from each other: such a p is rather too small, and speaks of these seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from perfed.core.streams import numpy_stream

DRAWS = 2000
AT_ONCE = 2_000_000  # numbers drawn at once: a few tens of megabytes
LEVEL = 0.95
ALPHA = 1 - LEVEL


def bootstrap_means(seeds: Sequence[Sequence[float]], draws: int = DRAWS) -> np.ndarray:
    """``draws`` times, the mean over seeds of the mean over clients, of seeds drawn with
    replacement and within each of them clients drawn with replacement.

    Two levels, since a seed divides the data anew: its clients are alike, and are not the clients
    of another seed.
    """
    random = numpy_stream(0, "bootstrap")
    values = [np.asarray(clients, dtype=float) for clients in seeds]
    drawn = random.integers(len(values), size=(draws, len(values)))
    means = np.empty(drawn.shape)
    for number, clients in enumerate(values):
        rows, columns = np.nonzero(drawn == number)
        step = max(1, AT_ONCE // len(clients))
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            picked = random.integers(len(clients), size=(len(rows[part]), len(clients)))
            means[rows[part], columns[part]] = clients[picked].mean(1)
    result: np.ndarray = means.mean(1)
    return result


def bootstrap_interval(
    seeds: Sequence[Sequence[float]], draws: int = DRAWS, level: float = LEVEL
) -> tuple[float, float]:
    """In which the mean over seeds and clients lies, by percentiles of :func:`bootstrap_means`."""
    outside = 100 * (1 - level) / 2
    low, high = np.percentile(bootstrap_means(seeds, draws), [outside, 100 - outside])
    return float(low), float(high)


TEST = "Wilcoxon's signed-rank test over {pairs}, with Holm's correction"
OVER_SEEDS = "seeds, each the mean of its clients"
OVER_CLIENTS = "clients, each its mean over seeds"
OVER_ONE_SEED = "the clients of one seed"
FEW = (
    "A test over clients assumes that they are independent. They learn from each other, so p is "
    "rather too small, and says nothing about other seeds."
)


def described(seeds: int, over_seeds: bool) -> str:
    """The test in words."""
    pairs = OVER_SEEDS if over_seeds else OVER_CLIENTS if seeds > 1 else OVER_ONE_SEED
    return TEST.format(pairs=pairs)


def signed_rank(differences: Sequence[float] | np.ndarray) -> float:
    """Wilcoxon's signed-rank test, two-sided: the probability of pairs that differ at least this
    much in one direction, if there is no direction. Pairs that do not differ are left out."""
    from scipy.stats import wilcoxon  # scikit-learn brings it

    values = np.asarray(differences, dtype=float)
    values = values[values != 0]
    if not len(values):
        return 1.0
    return float(wilcoxon(values).pvalue)


def holm(probabilities: Sequence[float]) -> list[float]:
    """Probabilities of several tests, each made as large as it must be for all of them to err in
    at most 5 % of the cases together (Holm 1979)."""
    order = np.argsort(probabilities, kind="stable")
    adjusted = [0.0] * len(probabilities)
    largest = 0.0
    for place, number in enumerate(order):
        largest = max(largest, (len(order) - place) * float(probabilities[number]))
        adjusted[number] = min(1.0, largest)
    return adjusted


def enough(pairs: int, methods: int) -> bool:
    """Whether so many pairs can tell one of ``methods`` from the best: if all of them differ in one
    direction, that is improbable enough."""
    return bool((methods - 1) * 2 / 2**pairs <= ALPHA)


def pairs_of(seeds: Sequence[Sequence[float]], over_seeds: bool) -> list[float]:
    """What a test compares, of every seed's clients: a number for each seed, the mean of its
    clients; or a number for each client, its mean over seeds.

    Never each client of each seed: clients of one run have learned from each other, and those of
    another seed are a second look at the same data. Where a seed has fewer clients than another,
    the last ones are left out.
    """
    if over_seeds:
        return [float(np.mean(clients)) for clients in seeds]
    count = min(map(len, seeds))
    means: list[float] = np.mean([clients[:count] for clients in seeds], axis=0).tolist()
    return means


def against_first(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Of each but the first, how probable its distance from the first is by chance, after Holm's
    correction. Nothing where pairs are so few that no distance could be told from chance."""
    if len(values) < 2:
        return {}
    (_, first), *others = values.items()
    if not enough(len(first), len(values)):
        return {}
    tests = [signed_rank(np.subtract(first, other)) for _, other in others]
    return dict(zip((name for name, _ in others), holm(tests), strict=True))
