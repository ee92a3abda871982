"""Figure 10: clean and adversarial images and their difference, as they are and as ME-Net sees them."""

from dataclasses import replace

from menet.experiments.paper import LOW, model, white_box
from menet.experiments.plan import Figure, Panel


def plan() -> Figure:
    job = replace(white_box(model("tiny-imagenet", p=LOW), 40), examples=100, pictures=4)
    panel = Panel("", sources=(("images", job),))
    return Figure(
        "figure10", "What an attack adds, and what is left of it", "pictures", (panel,), "", "appendix timgnet"
    )
