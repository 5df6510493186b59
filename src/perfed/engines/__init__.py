"""How clients execute. ``sequential`` is the reference."""

from perfed.engines.sequential import ClientRecord, SequentialEngine

__all__ = ["ClientRecord", "SequentialEngine"]
