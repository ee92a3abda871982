"""Training: a frozen configuration, one readable loop, and run folders that nothing is lost from."""

from menet.training import recipes
from menet.training.config import TrainingConfig
from menet.training.loading import load_model
from menet.training.loop import train

__all__ = ["TrainingConfig", "load_model", "recipes", "train"]
