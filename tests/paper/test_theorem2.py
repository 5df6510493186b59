"""Theorem 2, against a linear system that knows nothing of it, and against draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfed.paper.theorem2 import RULES, Problem, tables, theorem2

positive = st.floats(0.1, 10)
problems = st.builds(
    Problem,
    spread=st.lists(positive, min_size=2, max_size=6).map(tuple),
    dimensions=st.integers(1, 4),
    data=positive,
    public=positive,
    noise=positive,
)


@given(problems)
def test_the_derived_weights_are_the_optimum_and_sum_to_one(problem: Problem) -> None:
    for client in range(len(problem.spread)):
        derived = problem.combination(client, "derived")
        weights = problem.scale(client, printed=False) / problem.total_variances()
        assert weights.sum() == pytest.approx(1)
        np.testing.assert_allclose(derived, problem.combination(client, "optimum"), atol=1e-9)


@given(problems, st.integers(0, 2**32 - 1))
def test_no_other_combination_does_better(problem: Problem, seed: int) -> None:
    best = problem.combination(0, "derived")
    step = np.random.default_rng(seed).normal(size=len(best))
    other = best + step - step.mean()  # still sums to one
    assert error_of(problem, other) >= error_of(problem, best) - 1e-9


def error_of(problem: Problem, combination: np.ndarray) -> float:
    error = problem.error(0, combination)
    assert error is not None
    return error


@given(problems)
def test_another_lambda_does_not_help(problem: Problem) -> None:
    weights = problem.scale(0, printed=False) / problem.total_variances()
    own = np.eye(len(weights))[0]

    def error(factor: float) -> float:
        pull = factor * problem.best_weight(0) * problem.public
        return error_of(problem, (problem.data * own + pull * weights) / (problem.data + pull))

    assert error(1) <= min(error(0.5), error(2)) + 1e-9


def test_the_printed_weights_do_not_sum_to_one() -> None:
    result = theorem2(quick=True)
    for row in result["rows"]:
        errors = row["errors"]
        assert errors["printed"]["closed_form"] is None
        assert abs(errors["printed"]["sum_of_weights"] - 1) > 0.01
        for rule in set(RULES) - {"printed"}:
            assert errors[rule]["drawn"] == pytest.approx(errors[rule]["closed_form"], rel=0.05)
    assert result["rows"][0]["errors"]["printed"]["drawn"] > 5 * 2.51
    assert [row[0] for row in tables(result)[0].rows] == ["0", "1", "2", "3"]


def test_local_training_is_the_limit_of_no_transfer() -> None:
    problem = Problem(spread=(1e4, 1.0, 1.0))  # a client unlike all others gains nothing
    local = error_of(problem, problem.combination(0, "local"))
    derived = error_of(problem, problem.combination(0, "derived"))
    assert derived == pytest.approx(local, rel=1e-6)
    assert local == pytest.approx(3 * 3.0 / 2.0)  # d·σ²/β
