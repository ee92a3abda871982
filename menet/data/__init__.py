"""Datasets: one contract for all (`Dataset`), read from their publishers' own formats, never trusted blindly."""

from menet.data.catalog import NAMES
from menet.data.dataset import SPLITS, Dataset, DataWarning, Images
from menet.data.loading import load

__all__ = ["NAMES", "SPLITS", "DataWarning", "Dataset", "Images", "load"]
