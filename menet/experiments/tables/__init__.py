"""One module per table; each has `plan()`, which returns it at the scale of the paper."""
