"""The cross-entropy of a stack of clients.

Mapped by torch itself it becomes some twenty small operations. But a row of logits is like any
other, whichever client's it is: the clients' rows become one batch, for which torch has two
operations, and each client's mean is taken of its own rows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from perfed.engines.stacked.lanes import physical


class MappedLosses(TorchFunctionMode):
    """Inside, ``cross_entropy`` is that of a stack where it can be."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.cross_entropy:
            loss = mean_cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        return function(*args, **kwargs)


def mean_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Inside ``vmap``, for all clients; None where it is not plainly the mean over one client's
    rows of logits."""
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not plain or reduction != "mean" or logits.ndim != 2 or labels.ndim != 1:
        return None
    stack = physical([logits, labels])
    if stack is None:
        return None
    with stack.entered():
        rows, classes = stack.tensors
        losses = _losses(rows, classes, ignore_index)
        counted = (classes != ignore_index).sum(1, dtype=losses.dtype)
        means = losses.sum(1) / counted
    return stack.wrap(means)


def _losses(rows: Tensor, classes: Tensor, ignore_index: int) -> Tensor:
    """Of each sample. On a CPU with the samples last in memory, where logits mostly have them: a
    sum over a few classes side by side would take ten times as long."""
    if rows.is_cuda:
        flat = rows.flatten(0, 1), classes.flatten()
        losses = F.cross_entropy(*flat, ignore_index=ignore_index, reduction="none")
        return losses.view(classes.shape)
    return F.cross_entropy(
        rows.movedim(1, -1), classes, ignore_index=ignore_index, reduction="none"
    )
