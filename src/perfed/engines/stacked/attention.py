"""Attention of a stack of clients. It has no parameters: one client's samples are like another's.

So the clients' samples become one batch, which torch's fused attention can take. Mapped over
clients by torch itself, it would run client by client on a CPU, and fail in the backward pass on
a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from perfed.engines.stacked import hopper_vectors
from perfed.engines.stacked.lanes import physical
from perfed.engines.stacked.operations import in_precision

_FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def mapped_attention() -> Iterator[None]:
    """Inside, attention is that of a stack where it can be, and else made of plain products."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it has no rule for mapping at all
    try:
        with sdpa_kernel(SDPBackend.MATH), _OfStack():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class _OfStack(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            y = attended(*args, **kwargs)
            if y is not None:
                return y
        return function(*args, **kwargs)


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Tensor | None:
    """Inside ``vmap``, for all clients; None where it is not plainly that, or drops something:
    then the mask must come from each client's own stream."""
    if attn_mask is not None or dropout_p or query.ndim != 4:
        return None
    stack = physical([query, key, value])
    if stack is None:
        return None
    with stack.entered():
        y = attention_of_stack(*stack.tensors, is_causal=is_causal, **named)
    return stack.wrap(y)


def attention_of_stack(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Of (n, batch, heads, tokens, width); options as in ``scaled_dot_product_attention``."""
    n, batch = query.shape[:2]
    q, k, v = (tensor.flatten(0, 1) for tensor in in_precision(query, key, value))
    if not any(options.values()) and hopper_vectors.attends(q, k, v):
        y = hopper_vectors.attention(q, k, v)
    else:
        with sdpa_kernel(_FUSED):
            y = F.scaled_dot_product_attention(q, k, v, **options)
    return y.view(n, batch, *y.shape[1:])


def multihead(
    layer: nn.MultiheadAttention,
    otherwise: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **named: Any,
) -> tuple[Tensor, Tensor | None]:
    """``nn.MultiheadAttention`` by way of ``scaled_dot_product_attention`` where it asks for no
    more: torch's own hides that from :class:`_OfStack`."""
    masked = key_padding_mask is not None or attn_mask is not None
    special = layer.bias_k is not None or layer.add_zero_attn or layer.in_proj_weight is None
    dropped = layer.training and layer.dropout > 0
    if masked or need_weights or special or dropped or not layer.batch_first or query.ndim != 3:
        both: tuple[Tensor, Tensor | None] = otherwise(
            query,
            key,
            value,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            is_causal=is_causal,
            **named,
        )
        return both
    biases = (None,) * 3 if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(x, weight, bias).view(*x.shape[:2], layer.num_heads, -1).transpose(1, 2)
        for x, weight, bias in zip(
            (query, key, value), layer.in_proj_weight.chunk(3), biases, strict=True
        )
    )
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    return layer.out_proj(seen.transpose(1, 2).flatten(2)), None
