"""How clients execute: ``sequential`` is the reference, ``stacked`` the fast one."""

from perfed.engines.base import ClientRecord, Engine, Job
from perfed.engines.execution import Execution
from perfed.engines.population import Population, evaluation, outcome
from perfed.engines.sequential import SequentialEngine
from perfed.engines.stacked import StackedEngine
from perfed.engines.store import ClientStore

__all__ = [
    "ClientRecord",
    "ClientStore",
    "Engine",
    "Execution",
    "Job",
    "Population",
    "SequentialEngine",
    "StackedEngine",
    "evaluation",
    "outcome",
]
