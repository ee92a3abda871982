"""Speed as ratios, each measured side by side in one run."""

import os

# As the command line has it.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
