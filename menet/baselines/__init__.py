"""The defenses that the paper compares with, and others of their time: preprocessing before any classifier.

docs/baselines.md says what each of them claims and what later attacks found.
"""

from typing import Any

from torch import nn

from menet.baselines.defense_gan import DefenseGAN, project
from menet.baselines.feature_squeezing import (
    BitDepth,
    Discretize,
    MedianSmoothing,
    Thermometer,
    blended_colors,
    median_smooth,
    nearest_colors,
    reduce_depth,
    thermometer,
)
from menet.baselines.image_quilting import ImageQuilting, minimum_error_cut, nearest_patches, quilt
from menet.baselines.jpeg import JPEG, jpeg, smooth_jpeg
from menet.baselines.pixel_cnn import PixelCNN, train_pixel_cnn, train_pixel_cnn_plus
from menet.baselines.pixel_cnn_plus import PixelCNNPlusPlus
from menet.baselines.pixel_defend import PixelDefend, purify
from menet.baselines.resize_pad import ResizePad
from menet.baselines.total_variation import TotalVariation, total_variation
from menet.baselines.wgan import Generator, train_wgan
from menet.preprocessed import Preprocessed, rebuild

__all__ = [
    "JPEG",
    "BitDepth",
    "DefenseGAN",
    "Discretize",
    "Generator",
    "ImageQuilting",
    "MedianSmoothing",
    "PixelCNN",
    "PixelCNNPlusPlus",
    "PixelDefend",
    "ResizePad",
    "Thermometer",
    "TotalVariation",
    "blended_colors",
    "build",
    "jpeg",
    "median_smooth",
    "minimum_error_cut",
    "nearest_colors",
    "nearest_patches",
    "project",
    "purify",
    "quilt",
    "reduce_depth",
    "smooth_jpeg",
    "thermometer",
    "total_variation",
    "train_pixel_cnn",
    "train_pixel_cnn_plus",
    "train_wgan",
]


def build(name: str, classifier: nn.Module, **settings: Any) -> Preprocessed:
    """Put the defense called `name` before `classifier`; `settings` override its defaults."""
    built = rebuild(classifier, {"name": name, **settings})
    assert isinstance(built, Preprocessed)
    return built
