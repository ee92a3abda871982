"""The approximate input attack, the paper's first adaptive attack."""

from dataclasses import dataclass

from menet.attacks.displaced import DisplacedPGD


@dataclass(frozen=True, kw_only=True)
class ApproximateInput(DisplacedPGD):
    """BPDA against the defended model, around the defense's own reconstruction of the image.

    The paper: "this adversary attacks not the original image, but uses the exact preprocess method to
    approximate/reconstruct an input, and attacks the newly constructed image using the BPDA procedure". It
    does not say how the result is scored; here the change found at the reconstruction is added to the true
    image, so that epsilon means what it means for every other attack. The paper's 62.5 % lies above its plain
    BPDA (52.8 %).
    """
