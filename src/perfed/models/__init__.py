"""Networks, and which client gets which."""

from perfed.models.architectures import CNN, MLP, Architecture, architectures
from perfed.models.assignment import Models, build_module, initial_weights, parameter_count

__all__ = [
    "CNN",
    "MLP",
    "Architecture",
    "Models",
    "architectures",
    "build_module",
    "initial_weights",
    "parameter_count",
]
