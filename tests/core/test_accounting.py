"""The accountant against opacus', closed forms and a second formula."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from perfed.core.accounting import ORDERS, Spending, affordable, composed, epsilon, step_rdp
from perfed.core.privacy import Account, Privacy, noise_for, sampling_rate, told_number
from perfed.core.streams import chosen_each, gaussian

REFERENCE = json.loads(
    (Path(__file__).parents[2] / "benchmarks/results/accounting_reference.json").read_text()
)


@pytest.mark.parametrize("line", REFERENCE["settings"], ids=lambda line: f"q={line['rate']}")
def test_opacus_says_the_same(line: dict[str, float]) -> None:
    """``benchmarks/accounting_reference.py`` wrote down what it says."""
    mine = step_rdp(line["rate"], line["noise"])
    places = [int(np.abs(ORDERS - order).argmin()) for order in REFERENCE["orders"]]
    assert [mine[place] for place in places] == pytest.approx(line["rdp"], rel=1e-5, abs=1e-12)
    spent = composed([Spending(int(line["steps"]), line["rate"], line["noise"])])
    ours = epsilon(spent, REFERENCE["delta"])
    assert ours <= line["epsilon"] * (1 + 1e-6)  # there are more orders here to choose from
    assert ours == pytest.approx(line["epsilon"], rel=0.01)


def test_a_full_batch_is_the_plain_gaussian_mechanism() -> None:
    """Of which the RDP is α/(2σ²), and the exact δ of an ε is known: ε by RDP is an upper bound."""
    assert step_rdp(1.0, 2.0) == pytest.approx(ORDERS / 8)
    assert step_rdp(1 - 1e-12, 2.0) == pytest.approx(ORDERS / 8, rel=1e-6)
    assert step_rdp(0.0, 2.0) == (0.0,) * len(ORDERS)

    def exact_delta(bound: float, noise: float) -> float:  # Balle and Wang 2018
        def below(x: float) -> float:
            return 0.5 * (1 + math.erf(x / math.sqrt(2)))

        half = 1 / (2 * noise)
        return below(half - bound * noise) - math.exp(bound) * below(-half - bound * noise)

    found = epsilon(composed([Spending(1, 1.0, 2.0)]), 1e-5)
    assert exact_delta(found, 2.0) < 1e-5 < exact_delta(0.85 * found, 2.0)


def test_whole_orders_are_a_binomial_sum() -> None:
    rate, noise = 0.07, 0.9
    for order in (2, 3, 17):
        terms = [
            math.comb(order, k)
            * (1 - rate) ** (order - k)
            * rate**k
            * math.exp((k * k - k) / (2 * noise**2))
            for k in range(order + 1)
        ]
        place = int(np.abs(ORDERS - order).argmin())
        expected = math.log(sum(terms)) / (order - 1)
        assert step_rdp(rate, noise)[place] == pytest.approx(expected, rel=1e-9)


def test_very_little_noise_is_bounded_by_the_plain_mechanism() -> None:
    """Sums would be over 10^10 places; ε is useless there, and still no lie."""
    assert step_rdp(0.3, 1e-3) == pytest.approx(ORDERS / 2e-6)


def test_a_number_that_was_told_with_less_noise_stays_told_so() -> None:
    """Whatever the settings say later."""
    now = Privacy(noise=2.0, count_noise=10.0)
    then = Account(now, 0.2, telling=Spending(1, 1.0, 0.5))
    assert then.epsilon(5) == Account(Privacy(noise=2.0, count_noise=0.5), 0.2).epsilon(5)
    assert then.epsilon(5) > Account(now, 0.2).epsilon(5) + 5


def test_a_budget_is_reached_and_never_passed() -> None:
    told, step = composed([Spending(1, 1.0, 10.0)]), np.array(step_rdp(0.2, 1.5))
    for budget in (1.0, 3.0, 20.0):
        steps = affordable(told, step, budget, 1e-5)
        assert (
            epsilon(told + steps * step, 1e-5) <= budget < epsilon(told + (steps + 1) * step, 1e-5)
        )
        account = Account(Privacy(noise=1.5, epsilon=budget), 0.2)
        assert account.allows(0, steps)
        assert not account.allows(1, steps)
        elsewhere = Account(account.privacy, 0.2, (Spending(steps, 0.2, 1.5),))
        assert not elsewhere.allows(0, 1)  # another run has taken it all
    assert not Account(Privacy(noise=0.2, epsilon=0.4), 0.2).allows(0, 1)
    sigma = noise_for(3.0, 1e-5, 0.2, 100)
    spent = composed([Spending(100, 0.2, sigma), Spending(1, 1.0, 10.0)])
    assert 2.97 < epsilon(spent, 1e-5) <= 3.0


def test_each_sample_is_drawn_by_its_own_chance_and_noise_is_normal() -> None:
    cpu = torch.device("cpu")
    drawn = chosen_each(3, 4000, 50, 0.3, cpu).double()
    assert drawn.mean() == pytest.approx(0.3, abs=0.01)
    together = torch.corrcoef(drawn.T) - torch.eye(50)
    assert together.abs().max() < 0.09  # 4.5 standard errors over 2,450 pairs and more
    assert drawn.sum(1).var() == pytest.approx(50 * 0.3 * 0.7, rel=0.1)  # sizes vary, as they must
    assert chosen_each(3, 2, 50, 1.0, cpu).all()
    noise = gaussian(torch.tensor([5, 6]), (100_000,))
    assert noise.mean(1).abs().max() < 0.015
    assert (noise.std(1) - 1).abs().max() < 0.01
    assert (noise**4).mean(1).tolist() == pytest.approx([3, 3], abs=0.1)
    assert abs(float((noise[0] * noise[1]).mean())) < 0.015
    assert torch.equal(gaussian(torch.tensor(6), (100_000,)), noise[1])  # alone as in a stack


def test_a_number_of_samples_is_told_with_noise_and_rates_follow_it() -> None:
    privacy = Privacy(count_noise=5.0)
    assert [told_number(40, privacy, draw) for draw in (-20.0, -1.0, 0.0, 1.0)] == [1, 35, 40, 45]
    assert sampling_rate(32, 40) == 0.8
    assert sampling_rate(32, 20) == 1.0
