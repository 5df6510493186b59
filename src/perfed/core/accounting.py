"""How much of a sample's privacy is spent: Rényi differential privacy (RDP) of noised training.

A step draws each sample by itself with probability q, bounds what each adds to a sum, and adds
Gaussian noise of σ bounds: the sampled Gaussian mechanism. Its RDP of order α, for one sample more
or less, is (Mironov, Talwar, Zhang 2019)

    1/(α−1) · log E[(1 − q + q·exp((2z − 1)/(2σ²)))^α],  z ~ N(0, σ²).

RDP of several steps adds up. The smallest ε over the orders is the client's (ε, δ).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

ORDERS = np.array(
    [1.01, 1.02, 1.05]
    + [1 + tenth / 10 for tenth in range(1, 100)]
    + [*range(11, 65), 80, 96, 128, 192, 256, 512, 1024]
)
"""Small ones for a large ε, large ones for a small ε."""
REACH = 12.0
"""Standard deviations around what is integrated; beyond is less than 1e-32 of it."""
POINTS = 20
"""Places on the shortest length over which the integrand changes. A sum over equal steps of an
analytic function that vanishes at both ends is exact up to exp(−2π² · POINTS)."""
MOST_POINTS = 2**21
"""With less noise than about a tenth it would take more: then sampling is left out of account."""


class Spending(NamedTuple):
    """So many steps, each with every sample drawn with this probability; a rate of 1 and one step
    is the plain Gaussian mechanism."""

    steps: int
    rate: float
    noise: float
    """σ, in units of the most that a sample can add."""


@lru_cache(maxsize=4096)
def step_rdp(rate: float, noise: float) -> tuple[float, ...]:
    """The RDP of one step, for each of ``ORDERS``."""
    if rate >= 1:
        return tuple(ORDERS / (2 * noise**2))
    if rate <= 0:
        return (0.0,) * len(ORDERS)
    return tuple(_sampled(rate, noise, float(order)) for order in ORDERS)


def _sampled(rate: float, noise: float, order: float) -> float:
    step = min(noise, noise**2) / POINTS
    if order + 2 * REACH * noise > MOST_POINTS * step:
        return order / (2 * noise**2)  # as if every sample were drawn, which hides them less
    z = np.arange(-REACH * noise, order + REACH * noise, step)
    density = -(z**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * z - 1) / (2 * noise**2))
    logs = density + order * ratio
    largest = logs.max()
    moment = largest + math.log(np.exp(logs - largest).sum() * step)
    return max(0.0, float(moment) / (order - 1))  # by rounding it may be just below


def composed(spendings: Iterable[Spending]) -> np.ndarray:
    """The RDP of all of them, for each of ``ORDERS``."""
    total = np.zeros(len(ORDERS))
    for spending in spendings:
        total += spending.steps * np.array(step_rdp(spending.rate, spending.noise))
    return total


def epsilon(rdp: np.ndarray, delta: float) -> float:
    """The ε that goes with δ (Canonne, Kamath, Steinke 2020, proposition 12)."""
    if not rdp.any():
        return 0.0
    return max(0.0, float(np.min(rdp + _price(delta))))


def affordable(before: np.ndarray, step: np.ndarray, budget: float, delta: float) -> int:
    """How many more steps keep ε within a budget."""
    room = budget - _price(delta) - before
    steps = np.floor(room / np.maximum(step, 1e-300))
    return max(0, int(min(steps.max(), 2.0**62)))


def _price(delta: float) -> np.ndarray:
    """What is added to the RDP of each order."""
    price: np.ndarray = np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return price
