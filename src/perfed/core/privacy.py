"""What a client does so that nobody learns from its messages whether it has a certain sample.

A client then has two models. The one *at home* is trained as ever; nothing that is made of it
leaves. The one that *speaks* is trained with noise (DP-SGD), and all that is sent is made of it
alone. Whatever is computed from a noised model costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from perfed.core.accounting import Spending, affordable, composed, epsilon, step_rdp
from perfed.core.errors import ConfigError
from perfed.core.schema import Options, option

IN_WORDS = """\
What is protected
  Each training sample of a client. Somebody who sees all that the client sends, in all rounds,
  learns little of whether one certain sample was there: what they see is at most e^ε times as
  probable with it as without it, but for a chance of δ. With ε = 1 that is a factor of 3, with
  ε = 8 a factor of 3,000. ε is counted for each client and is in every table.

Against whom
  The server, other clients, and whoever reads the messages. Also if they work together, know all
  other samples, and know every setting.

How
  A client has two models. The one at home is trained as ever, and nothing made of it leaves. The
  one that speaks sees each sample with a certain chance in each step. Each sample's gradient is cut
  at 'clip', and noise is added to their sum. All that is sent is made of this second model. The
  number of samples is told once, with noise. Label counts, accuracies and what is learnt on
  validation samples are not sent. A client that has spent its budget trains no more for others.
  It still answers, from what its speaking model knows, which costs nothing.

What is not protected
  - The model at home, and its accuracy. It is not noised: whoever gets it can learn from it. At a
    site it is personal.safetensors; a simulation's run directory has those of all clients.
  - What all samples of a client say together, such as which classes it has. It shows less clearly.
  - A person with many samples. For k samples ε is up to k times as large, and δ by far more.
  - How samples are divided into train, validation and test: the division is taken as given. So are
    a simulation's scales and values of a table's columns, which come from all clients' samples.
  - Whether and when a client answers, its network, and the public set.
  - What a site sent without privacy, or with another folder 'state': that is not in its ε.
  - A simulation: there the noise follows from the seed, so that runs can be repeated. A site draws
    a secret seed for every round and keeps it nowhere.
  - Against an enemy who breaks the random numbers or reads the last bits of what is rounded: the
    noise is SplitMix64's, with keys of 63 bits, in floating point, not made for cryptography.

Which methods
  Those that send outputs on public samples, weights or parts of networks. A method that sends
  something else of its samples (class means, label counts, a choice by its losses) is refused.
"""


@dataclass(frozen=True)
class Privacy(Options):
    """Differential privacy of each training sample of a client."""

    noise: float = option(
        1.0,
        "σ: the noise on the sum of a step's gradients, in units of 'clip'; more noise, smaller ε",
        gt=0,
    )
    clip: float = option(1.0, "C: no sample's gradient is longer than this", gt=0)
    delta: float = option(1e-5, "δ: the chance that the guarantee fails, at most", gt=0, lt=1)
    epsilon: float | None = option(
        None,
        "the most that a client spends over all rounds; then it trains no more for others, and "
        "answers from what its model knows; none: no limit, ε is only counted",
        gt=0,
    )
    count_noise: float = option(
        10.0,
        "standard deviation, in samples, of the noise on the number of training samples that a "
        "client tells, once",
        gt=0,
    )

    def validate(self) -> None:
        told = epsilon(composed([self.told()]), self.delta)
        if self.epsilon is not None and told > self.epsilon:
            raise ConfigError(
                f"{self.epsilon:g}: to tell the number of samples takes {told:.3g} of it already; "
                "allow more, or set a larger count_noise",
                "epsilon",
            )

    def told(self) -> Spending:
        """What it costs to tell a number that one sample changes by one."""
        return Spending(1, 1.0, self.count_noise)


@dataclass(frozen=True)
class Account:
    """What one client has spent, beside the steps it counts itself."""

    privacy: Privacy
    rate: float
    """The probability with which a step draws each sample."""
    before: tuple[Spending, ...] = ()
    """In other runs."""
    telling: Spending | None = None
    """What it cost to tell the number of samples, where that was done with another noise."""

    @lru_cache(maxsize=4096)  # noqa: B019 - of values, not of things that live
    def epsilon(self, steps: int) -> float:
        return epsilon(self._spent(steps), self.privacy.delta)

    def allows(self, done: int, more: int) -> bool:
        """Whether so many more steps keep within the budget."""
        budget = self.privacy.epsilon
        if budget is None:
            return True
        step = np.array(step_rdp(self.rate, self.privacy.noise))
        return done + more <= affordable(self._spent(0), step, budget, self.privacy.delta)

    def _spent(self, steps: int) -> np.ndarray:
        own = Spending(steps, self.rate, self.privacy.noise)
        return composed([*self.before, self.telling or self.privacy.told(), own])


def told_number(samples: int, privacy: Privacy, draw: float) -> int:
    """The number of samples that a client tells; ``draw`` is standard normal."""
    return max(1, round(samples + privacy.count_noise * draw))


def sampling_rate(batch_size: int, told: int) -> float:
    """So that a step draws about ``batch_size`` samples. By the number that is told: the true one
    is not to be learnt from it."""
    return min(1.0, batch_size / told)


def noise_for(budget: float, delta: float, rate: float, steps: int, told: float = 10.0) -> float:
    """The least σ (to a thousandth) that makes so many steps within a budget; infinity where even
    telling a number of samples takes too much."""

    def fits(noise: float) -> bool:
        spent: Sequence[Spending] = [Spending(steps, rate, noise), Spending(1, 1.0, told)]
        return epsilon(composed(spent), delta) <= budget

    low, high = 0.1, 0.1
    while not fits(high):
        low, high = high, 2 * high
        if high > 1e5:
            return math.inf
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
