import math

import pytest
import torch
from torch import Tensor

from perfed.core import tree
from perfed.core.tree import (
    SMALL,
    Weights,
    _in_memory_order,
    extremes,
    find_not_finite,
    flatten,
    unflatten,
)


def test_numbers_without_gaps_are_seen_as_they_lie() -> None:
    lying = torch.arange(24.0)
    dense: list[Tensor] = [lying.view(24), lying.view(2, 3, 4), lying.view(2, 1, 3, 4).mT]
    dense += [lying.view(2, 3, 4, 1).permute(3, 1, 0, 2), lying[7]]
    for tensor in dense:
        seen = _in_memory_order(tensor)
        assert seen.data_ptr() == tensor.data_ptr()
        assert torch.equal(seen, lying[7:8] if tensor.ndim == 0 else lying)


def test_numbers_with_gaps_are_all_there() -> None:
    lying = torch.arange(24.0)
    for tensor in (lying.view(4, 6)[:, 1:3].mT, lying[::5], lying[:3].expand(2, 3)):
        assert sorted(_in_memory_order(tensor).tolist()) == sorted(tensor.flatten().tolist())


def test_extremes_of_small_and_of_large_tensors() -> None:
    random = torch.Generator().manual_seed(0)
    singles = [torch.randn(n, generator=random) for n in (3, SMALL, SMALL + 1)]
    singles += [torch.randn(2, 5, generator=random).mT, torch.tensor(-9.0)]
    doubles = [torch.tensor([2.0, 5.0]).double()]
    for where in range(len(singles)):  # the largest is in each of them once
        singles[where] = singles[where] + 10 * (where + 1)
        found = [(f.dtype, float(f.min()), float(f.max())) for f in extremes(singles + doubles)]
        joined = torch.cat([tensor.flatten() for tensor in singles])
        assert found == [
            (torch.float32, float(joined.min()), float(joined.max())),
            (torch.float64, 2.0, 5.0),
        ]


def test_on_a_gpu_not_all_of_a_rounds_models_are_copied_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tree, "LARGE", 6)
    copied: list[int] = []
    cat = torch.cat

    def watched(part: list[Tensor], *dimension: int) -> Tensor:
        copied.append(len(part))
        return cat(part, *dimension)

    monkeypatch.setattr(torch, "cat", watched)
    tensors = [torch.zeros(size, device="meta") for size in (3, 3, 10, 1, 2)]
    assert [len(part) for part in tree._in_parts(tensors)] == [2, 1, 2]
    (found,) = extremes(tensors)
    assert found.shape == (6,)  # the smallest and the largest of each part
    assert 1 not in copied  # what is large is looked at where it lies


@pytest.mark.parametrize("size", [1, 7, SMALL, SMALL + 1])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_found_wherever_it_is(size: int, value: float) -> None:
    broken = torch.zeros(size)
    broken[size // 2] = value
    fine = [("a", torch.ones(3)), ("b", torch.ones(SMALL + 5))]
    assert find_not_finite({1: fine}) is None
    assert find_not_finite({1: fine, 2: [*fine, ("c", broken)]}) == (2, "c")


def test_a_part_of_a_model_comes_back_as_it_was() -> None:
    """It may have running statistics and no parameters."""
    part = Weights({}, {"mean": torch.ones(2)})
    assert unflatten(flatten({"base": part, "samples": torch.tensor(3)}))["base"] == part
    assert unflatten(flatten({"base": Weights({}, {})})) == {}
    # A tensor may have such a name, and is no part of a model.
    named = {"state": {"buffers": torch.ones(1), "params": torch.ones(2)}}
    assert unflatten(flatten(named)) == named
