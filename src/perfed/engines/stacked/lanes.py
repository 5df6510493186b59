"""Inside ``torch.func.vmap``: from one client's tensors to those of the whole stack, and back.

``vmap`` shows a function one client's tensors; behind each is a tensor of all clients. A layer that
has a better way for all clients at once than what ``vmap`` would do takes that tensor, computes,
and hands the result back as if it had computed for one.

torch has no public way to do this. Its private parts are imported by name, so that a torch without
them is found when the engine is imported: :meth:`~perfed.engines.execution.Execution.build_engine`
then takes another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    get_unwrapped,
    is_batchedtensor,
    is_functionaltensor,
    is_gradtrackingtensor,
    maybe_get_bdim,
    maybe_get_level,
)
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack


@dataclass(frozen=True)
class Lanes:
    """The tensors of all clients, clients first."""

    tensors: list[Tensor]
    level: int

    def entered(self) -> AbstractContextManager[None]:
        """Inside, tensors are what they are: nothing is mapped."""
        return temporarily_pop_interpreter_stack()

    def wrap(self, tensor: Tensor) -> Tensor:
        """One client's view of a tensor of all clients."""
        wrapped: Tensor = _add_batch_dim(tensor, 0, self.level)
        return wrapped


def physical(tensors: Sequence[Tensor]) -> Lanes | None:
    """What is behind ``tensors``; None where they are not plainly mapped."""
    level, size = -1, 0
    for tensor in tensors:
        if is_gradtrackingtensor(tensor) or is_functionaltensor(tensor):
            return None
        if is_batchedtensor(tensor):
            level = maybe_get_level(tensor)
            size = get_unwrapped(tensor).shape[maybe_get_bdim(tensor)]
    if level < 0:
        return None
    behind = []
    for tensor in tensors:
        if not is_batchedtensor(tensor):
            behind.append(tensor.unsqueeze(0).expand(size, *tensor.shape))
            continue
        dim, tensor = maybe_get_bdim(tensor), get_unwrapped(tensor)
        behind.append(tensor.movedim(dim, 0) if dim else tensor)
    return Lanes(behind, level)
