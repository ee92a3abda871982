"""The paper's networks, and two for a few cores: images in [0,1] → logits, normalization inside."""

from menet.models import weights
from menet.models.network import Architecture, Network, Normalize
from menet.models.registry import NETWORKS, build, initialize

__all__ = ["NETWORKS", "Architecture", "Network", "Normalize", "build", "initialize", "weights"]
