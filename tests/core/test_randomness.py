"""Random numbers of networks: the right share, the same everywhere, different where they should."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from perfed.core.randomness import addressed, draws_numbers

X = torch.ones(400, 500)


def dropped(key: int, times: int = 1, p: float = 0.3) -> list[Tensor]:
    with addressed(torch.tensor(key)):
        return [F.dropout(X, p) for _ in range(times)]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_leaves_out_its_share_and_scales_the_rest(p: float) -> None:
    (y,) = dropped(3, p=p)
    share = float((y == 0).double().mean())
    assert abs(share - p) < 4 * (p * (1 - p) / X.numel()) ** 0.5 + 1e-9
    assert p == 1 or torch.allclose(y[y > 0], torch.tensor(1 / (1 - p)))


def test_steps_clients_and_draws_have_masks_of_their_own() -> None:
    masks = [y == 0 for key in (1, 2, 2**62) for y in dropped(key, times=2)]
    for one, other in combinations(masks, 2):
        both = float((one & other).double().mean())
        assert abs(both - 0.09) < 5 * (0.09 * 0.91 / X.numel()) ** 0.5  # independent
    assert all(torch.equal(a, b) for a, b in zip(dropped(7, 3), dropped(7, 3), strict=True))


def test_neither_rows_nor_columns_repeat() -> None:
    (y,) = dropped(5)
    rows, columns = (y == 0).double().mean(1), (y == 0).double().mean(0)
    for means, count in ((rows, 500), (columns, 400)):
        assert abs(float(means.var()) / (0.3 * 0.7 / count) - 1) < 0.4


def test_nobody_elses_generator_is_moved() -> None:
    before = torch.get_rng_state()
    dropped(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_uniform_and_normal_numbers_have_their_moments() -> None:
    with addressed(torch.tensor(9)):
        uniform, normal = torch.rand_like(X), torch.randn(400, 500)
        between = torch.empty(400, 500).uniform_(2, 4)
        around = torch.empty(400, 500).normal_(5, 0.1)
    assert 0 <= uniform.min() < uniform.max() < 1
    for values, mean, deviation in [
        (uniform, 0.5, 12**-0.5),
        (between, 3.0, 2 * 12**-0.5),
        (normal, 0.0, 1.0),
        (around, 5.0, 0.1),
    ]:
        assert float(values.mean()) == pytest.approx(mean, abs=0.01)
        assert float(values.std()) == pytest.approx(deviation, rel=0.01)
    assert float((normal.abs() > 1.96).double().mean()) == pytest.approx(0.05, abs=0.003)


def test_a_stack_has_each_clients_own_numbers() -> None:
    keys = torch.tensor([4, 8])
    with addressed(keys):
        both = vmap(lambda x: F.dropout(x, 0.5), randomness="different")(torch.stack([X, X]))
    for lane, key in enumerate(keys):
        with addressed(key):
            assert torch.equal(F.dropout(X, 0.5), both[lane])


def test_what_has_no_stream_is_refused_in_a_stack_only() -> None:
    with addressed(torch.tensor(1)):
        torch.randperm(5)
    with addressed(torch.tensor([1, 2])), pytest.raises(RuntimeError, match="randperm"):
        torch.randperm(5)
    with addressed(torch.tensor([1, 2])), pytest.raises(RuntimeError, match="each client's own"):
        torch.rand(5)


def test_who_draws_is_found_by_trying_and_left_as_it_was() -> None:
    norm = nn.BatchNorm1d(500)
    drawing = nn.Sequential(norm, nn.Dropout(0.1)).eval()
    assert draws_numbers(drawing, X)
    assert not draws_numbers(norm, X)
    assert not drawing.training
    assert int(norm.num_batches_tracked or 0) == 0
    assert not draws_numbers(nn.Linear(3, 3), X)  # which fails, and says so elsewhere
