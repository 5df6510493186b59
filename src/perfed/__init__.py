"""Personalized federated learning for clients that differ in data and in model.

>>> import perfed
>>> result = perfed.run(perfed.Experiment(rounds=2, clients=9, clients_per_round=3))
>>> print(result.table())  # doctest: +SKIP
"""

from importlib import metadata as _metadata

import perfed.core.waiting  # before torch

# isort: split
import perfed.algorithms
import perfed.core.codecs  # noqa: F401  (and codecs)
from perfed.config import Comparison, Experiment, Training, load
from perfed.core.algorithm import Algorithm, algorithms
from perfed.core.errors import PerfedError
from perfed.core.hostile import Attack, attacks
from perfed.core.message import Message
from perfed.core.optimizer import Optimizer, optimizers
from perfed.core.schedule import Schedule, schedules
from perfed.core.tree import Weights
from perfed.core.wire import Stage, stages
from perfed.data import Split, datasets, partitions, shifts
from perfed.engines import Execution
from perfed.models import Models, architectures
from perfed.report import DRAWING as _DRAWING
from perfed.runs import (
    Callback,
    ComparisonResult,
    Result,
    RoundReport,
    compare,
    load_model,
    resume,
    run,
)
from perfed.runs.drawing import draw_with as _draw_with

_draw_with(_DRAWING)  # so that a result can plot itself

try:
    __version__ = _metadata.version("perfed")
except _metadata.PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Algorithm",
    "Attack",
    "Callback",
    "Comparison",
    "ComparisonResult",
    "Execution",
    "Experiment",
    "Message",
    "Models",
    "Optimizer",
    "PerfedError",
    "Result",
    "RoundReport",
    "Schedule",
    "Split",
    "Stage",
    "Training",
    "Weights",
    "algorithms",
    "architectures",
    "attacks",
    "compare",
    "datasets",
    "load",
    "load_model",
    "optimizers",
    "partitions",
    "resume",
    "run",
    "schedules",
    "shifts",
    "stages",
]
