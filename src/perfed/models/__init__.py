"""Networks, and which client gets which."""

from perfed.models import pictures as pictures
from perfed.models import sequences as sequences
from perfed.models.architectures import CNN, MLP, Architecture, architectures, last_linear
from perfed.models.assignment import (
    Models,
    build_module,
    check_trains_on_one,
    find_head,
    initial_weights,
    inputs_for,
    parameter_count,
)

__all__ = [
    "CNN",
    "MLP",
    "Architecture",
    "Models",
    "architectures",
    "build_module",
    "check_trains_on_one",
    "find_head",
    "initial_weights",
    "inputs_for",
    "last_linear",
    "parameter_count",
]
