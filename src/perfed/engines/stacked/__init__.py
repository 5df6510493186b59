"""All clients of one architecture train as one: a batch of models.

The engine uses private parts of torch. Where one is missing, importing this fails, and runs take
the engine ``sequential``.
"""

import torch

for _part in ("Graph", "_create_function_from_graph"):  # what the tape is made with
    if not hasattr(torch._C, _part):
        raise ImportError(f"torch._C has no {_part}")

from perfed.engines.stacked.engine import StackedEngine  # noqa: E402

__all__ = ["StackedEngine"]
