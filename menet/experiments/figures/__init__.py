"""One module per figure; each has `plan()`, which returns it at the scale of the paper."""
