import torch
from torch import Tensor

from perfed.core.tree import Weights, _in_memory_order, flatten, unflatten


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


def test_a_part_of_a_model_comes_back_as_it_was() -> None:
    """It may have running statistics and no parameters."""
    part = Weights({}, {"mean": torch.ones(2)})
    assert unflatten(flatten({"base": part, "samples": torch.tensor(3)}))["base"] == part
    assert unflatten(flatten({"base": Weights({}, {})})) == {}
    # A tensor may have such a name, and is no part of a model.
    named = {"state": {"buffers": torch.ones(1), "params": torch.ones(2)}}
    assert unflatten(flatten(named)) == named
