"""How clients execute: ``sequential`` is the reference, ``stacked`` the fast one.

:mod:`perfed.engines.stacked` and :mod:`perfed.engines.ray` are imported when they are used.
"""

from perfed.engines.base import Call, ClientRecord, Engine, Outcome
from perfed.engines.execution import Execution
from perfed.engines.population import Population
from perfed.engines.sequential import SequentialEngine
from perfed.engines.store import ClientStore

__all__ = [
    "Call",
    "ClientRecord",
    "ClientStore",
    "Engine",
    "Execution",
    "Outcome",
    "Population",
    "SequentialEngine",
]
