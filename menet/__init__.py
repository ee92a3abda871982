"""Matrix estimation as a defense for image classifiers (ME-Net), and honest measurements of it."""

__version__ = "0.1.0"
