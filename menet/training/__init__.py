"""Training: a frozen configuration, one readable loop, and run folders that resume to the same bits."""

from menet.training import recipes
from menet.training.checkpoint import load_model
from menet.training.config import TrainingConfig
from menet.training.loop import TrainingResult, train

__all__ = ["TrainingConfig", "TrainingResult", "load_model", "recipes", "train"]
