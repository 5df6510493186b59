"""The bounded part of the fuzzing: the same inputs each time, some seconds in all."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.__main__ import TARGETS
from tests.fuzz.mutation import KINDS, Edit, edited

MUTATIONS = {"run-directories": 200, "configurations": 100}  # these are slow to read
numbers = st.integers(0, 2**32)
edits = st.lists(st.builds(Edit, st.sampled_from(KINDS), numbers, numbers, numbers), max_size=4)


@pytest.mark.attack("fuzzed")
@pytest.mark.parametrize("name", TARGETS)
def test_whatever_comes_is_accepted_rightly_or_refused(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = TARGETS[name](tmp_path_factory.mktemp("fuzz"))
    seeds = target.seeds()
    assert all(map(target.accepts, seeds))

    @settings(  # without shrinking: what is slow to read would take minutes
        max_examples=MUTATIONS.get(name, 300),
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    @given(st.sampled_from(seeds), edits)
    def mutated(seed: bytes, changes: list[Edit]) -> None:
        target.accepts(edited(seed, changes, target.tokens))

    mutated()
