"""Intervals and tests against closed forms, full enumeration and numbers worked out by hand."""

import itertools
from fractions import Fraction

import numpy as np
import pytest

from perfed.runs import significance
from perfed.runs.significance import (
    against_first,
    bootstrap_interval,
    bootstrap_means,
    enough,
    holm,
    pairs_of,
    signed_rank,
)


def every_mean(seeds: list[list[float]]) -> np.ndarray:
    """The mean of every possible draw of seeds and of clients in them, each as often as it is
    probable."""
    found = []
    for drawn in itertools.product(seeds, repeat=len(seeds)):
        by_seed = [itertools.product(clients, repeat=len(clients)) for clients in drawn]
        for picked in itertools.product(*by_seed):
            found.append(np.mean([np.mean(clients) for clients in picked]))
    return np.array(found)


@pytest.mark.parametrize(
    "seeds", [[[1.0, 4.0]], [[1.0, 4.0], [9.0, 3.0]], [[-2.0, 0.0, 5.0], [1.0, 1.5, 8.0]]]
)
def test_draws_are_distributed_as_all_draws_are(seeds: list[list[float]]) -> None:
    exact, drawn = every_mean(seeds), bootstrap_means(seeds, 40_000)
    error = exact.std() / np.sqrt(40_000)
    assert drawn.mean() == pytest.approx(exact.mean(), abs=5 * error)
    assert drawn.std() == pytest.approx(exact.std(), rel=0.02)
    assert set(drawn.round(6)) == set(exact.round(6))


def test_the_spread_is_that_of_the_closed_form_for_two_levels() -> None:
    """Var = (variance of seed means) / S + (mean variance in a seed) / (S K); seeds that differ
    make it wider than clients alone would."""
    seeds = np.random.default_rng(5).normal(size=(4, 30)) + np.array([[0], [1], [2], [5]])
    wanted = seeds.mean(1).var() / 4 + (seeds.var(1) / 30).mean() / 4
    drawn = bootstrap_means(seeds.tolist(), 40_000)
    assert drawn.var() == pytest.approx(wanted, rel=0.03)
    assert drawn.var() > 5 * seeds.var(1).mean() / 120


def test_one_seed_is_the_plain_bootstrap_of_its_clients() -> None:
    clients = np.random.default_rng(3).normal(size=400)
    low, high = bootstrap_interval([clients.tolist()], 20_000)
    half = 1.96 * clients.std() / 20
    assert low == pytest.approx(clients.mean() - half, abs=0.03 * half)
    assert high == pytest.approx(clients.mean() + half, abs=0.03 * half)


def test_seeds_may_have_different_numbers_of_clients_and_no_gain_has_no_width() -> None:
    assert bootstrap_interval([[1.5], [1.5, 1.5, 1.5]]) == (1.5, 1.5)


def test_the_same_every_time_and_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [[1.0, 2.0, 7.0], [0.0, 3.0]]
    whole = bootstrap_interval(seeds)
    assert bootstrap_interval(seeds) == whole
    monkeypatch.setattr(significance, "AT_ONCE", 10)
    assert bootstrap_interval(seeds) == pytest.approx(whole, abs=0.3)


def test_holm_by_hand() -> None:
    # 4 × 0.01 = 0.04, 3 × 0.02 = 0.06, 2 × 0.03 = 0.06 (not below the one before), 1 × 0.04 → 0.06
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def exact_signed_rank(differences: list[float]) -> Fraction:
    """Of all signs of the ranks, the share with a sum as far from the middle as this one."""
    order = sorted(map(abs, differences))
    ranks = [order.index(abs(value)) + 1 for value in differences]
    total = sum(ranks)
    found = sum(r for r, value in zip(ranks, differences, strict=True) if value > 0)
    far = abs(2 * found - total)
    sums = [
        sum(itertools.compress(ranks, signs))
        for signs in itertools.product((0, 1), repeat=len(ranks))
    ]
    return Fraction(sum(abs(2 * s - total) >= far for s in sums), len(sums))


@pytest.mark.parametrize(
    "differences", [[1.0, 2.0, 3.0, 4.0, 5.0], [-1.0, 2.5, 4.0, -0.5, 7.0, 9.0]]
)
def test_signed_ranks_by_counting(differences: list[float]) -> None:
    assert signed_rank(differences) == pytest.approx(float(exact_signed_rank(differences)))


def test_pairs_that_do_not_differ_say_nothing() -> None:
    assert signed_rank([0.0, 0.0]) == 1.0
    assert signed_rank([0.0, 1.0, 2.0, 3.0]) == signed_rank([1.0, 2.0, 3.0])


def test_pairs_too_few_for_any_result_give_none() -> None:
    """Two tests of n pairs: at best 2 · 2 / 2ⁿ, which is below 0.05 from n = 7 on."""
    first = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    lower = [value / 2 for value in first]
    found = against_first({"a": first, "b": lower, "c": lower})
    assert found == pytest.approx({"b": 4 / 2**7, "c": 4 / 2**7})
    assert against_first({"a": first[1:], "b": lower[1:], "c": lower[1:]}) == {}
    assert against_first({"a": first}) == {}


def test_a_second_look_at_the_same_clients_is_no_second_pair() -> None:
    once, twice = [[1.0, 2.0, 4.0]], [[1.0, 2.0, 4.0], [3.0, 2.0, 0.0]]
    assert pairs_of(once, over_seeds=False) == [1.0, 2.0, 4.0]
    assert pairs_of(twice, over_seeds=False) == [2.0, 2.0, 2.0]
    assert pairs_of(twice, over_seeds=True) == pytest.approx([7 / 3, 5 / 3])
    assert len(pairs_of([[1.0, 2.0], [1.0, 2.0, 3.0]], over_seeds=False)) == 2


def test_how_many_pairs_are_enough_by_hand() -> None:
    """Five pairs in one direction have a two-sided probability of 2/32, six of 2/64."""
    assert not enough(5, 2)
    assert enough(6, 2)
    assert not enough(6, 3)  # of two comparisons, by Holm, the first must be half as probable
    assert enough(7, 3)
