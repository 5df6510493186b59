"""Models that people use: predictions for new files, export, and a page in the browser."""

from perfed.use.exporting import export_model
from perfed.use.opening import Ready, open_model
from perfed.use.prediction import Prediction, predict

__all__ = ["Prediction", "Ready", "export_model", "open_model", "predict"]
