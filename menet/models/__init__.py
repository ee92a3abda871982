"""The networks of the paper, and one for two cores: images in [0,1] → logits, normalisation inside."""

from menet.models import weights
from menet.models.initialise import initialise
from menet.models.network import Architecture, Network
from menet.models.normalise import Normalise
from menet.models.registry import NETWORKS, build

__all__ = ["NETWORKS", "Architecture", "Network", "Normalise", "build", "initialise", "weights"]
