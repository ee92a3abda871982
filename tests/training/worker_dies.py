"""`menet train …` whose second process is killed once, in the middle of an epoch: started by torchrun."""

import os
import signal
import sys

from menet.cli import main
from menet.training import loop

first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
original, calls = loop.Step.forward, []


def forward(self, *arguments):
    calls.append(1)
    if len(calls) == 6 and os.environ["RANK"] == "1" and first_attempt:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, *arguments)


if __name__ == "__main__":
    loop.Step.forward = forward
    sys.exit(main(sys.argv[1:]))
