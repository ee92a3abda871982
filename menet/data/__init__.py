"""Datasets: one contract for all (`Dataset`), read from their publishers' own formats."""

from menet.data.catalog import NAMES
from menet.data.dataset import SPLITS, Dataset, DataWarning, Images
from menet.data.loading import load

__all__ = ["NAMES", "SPLITS", "DataWarning", "Dataset", "Images", "load"]
