"""The defenses the paper compares with, and others of their time: preprocessing before any classifier.

What each claims and what later attacks did to it is in docs/baselines.md.
"""

from typing import Any

from torch import nn

from menet.baselines.bit_depth import BitDepth, reduce_depth
from menet.baselines.discretise import Discretise, blended_colours, nearest_colours
from menet.baselines.jpeg import JPEG, jpeg, smooth_jpeg
from menet.baselines.median import MedianSmoothing, median_smooth
from menet.baselines.pixel_cnn import PixelCNN, train_pixel_cnn
from menet.baselines.pixel_defend import PixelDefend, purify
from menet.baselines.resize_pad import ResizePad
from menet.baselines.thermometer import Thermometer, thermometer
from menet.baselines.total_variation import TotalVariation
from menet.baselines.variation_solver import total_variation
from menet.preprocessed import Preprocessed, rebuild

__all__ = [
    "JPEG",
    "BitDepth",
    "Discretise",
    "MedianSmoothing",
    "PixelCNN",
    "PixelDefend",
    "ResizePad",
    "Thermometer",
    "TotalVariation",
    "blended_colours",
    "build",
    "jpeg",
    "median_smooth",
    "nearest_colours",
    "purify",
    "reduce_depth",
    "smooth_jpeg",
    "thermometer",
    "total_variation",
    "train_pixel_cnn",
]


def build(name: str, classifier: nn.Module, **settings: Any) -> Preprocessed:
    """`classifier` behind the defense called `name`, with `settings` in place of its defaults."""
    built = rebuild(classifier, {"name": name, **settings})
    assert isinstance(built, Preprocessed)
    return built
