"""Datasets behind one interface (`Dataset`), read from their publishers' own formats."""

from menet.data.catalog import NAMES, load
from menet.data.dataset import SPLITS, Dataset, DataWarning, Images

__all__ = ["NAMES", "SPLITS", "DataWarning", "Dataset", "Images", "load"]
