# mypy: disable-error-code="no-untyped-call"
"""How much a network computes: by this engines choose threads and the sizes of stacks.

It is counted, not timed: two runs of one command must make the same choices, for other choices give
other last bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from perfed.core.randomness import DispatchMode

_aten = torch.ops.aten


def forward_flops(module: nn.Module, x: Tensor) -> int:
    """Floating-point operations in the matrix products and convolutions of one evaluation."""
    counter, was_training = _Counter(), module.training
    try:
        with torch.no_grad(), counter:
            module.eval()(x)
    except Exception:  # a network that cannot run says so where it is used
        return 0
    finally:
        module.train(was_training)
    return counter.flops


class _Counter(DispatchMode):
    """FlopCounterMode of torch would import its compiler, for seconds."""

    flops = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operation(*args, **(kwargs or {}))
        kind = operation.overloadpacket
        if kind is _aten.convolution:
            pictures, weight = args[0] if args[6] else made, args[1]  # transposed: the other way
            self.flops += 2 * pictures.numel() * weight[0].numel()
        elif kind in (_aten.mm, _aten.bmm):
            self.flops += 2 * made.numel() * args[0].shape[-1]
        elif kind in (_aten.addmm, _aten.baddbmm):
            self.flops += 2 * made.numel() * args[1].shape[-1]
        elif kind is _aten.mkldnn_rnn_layer:  # one layer of an LSTM, over all of a sequence
            self.flops += 2 * args[0].shape[:2].numel() * (args[1].numel() + args[2].numel())
        elif kind is _aten._scaled_dot_product_flash_attention_for_cpu:
            self.flops += 4 * args[0].numel() * args[1].shape[-2]
        return made
