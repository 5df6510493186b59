"""Run directories, checkpoints, and the loop that fills them."""

from perfed.runs.comparison import ComparisonResult, compare, resume, resume_comparison
from perfed.runs.coordinator import Callback, RoundReport
from perfed.runs.model_file import load_model
from perfed.runs.result import Result
from perfed.runs.simulation import run

__all__ = [
    "Callback",
    "ComparisonResult",
    "Result",
    "RoundReport",
    "compare",
    "load_model",
    "resume",
    "resume_comparison",
    "run",
]
