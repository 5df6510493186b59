"""All clients of one architecture train as one: a batch of models."""

from perfed.engines.stacked.engine import StackedEngine

__all__ = ["StackedEngine"]
