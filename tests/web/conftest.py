"""Small trained networks for the page, made once for all tests."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from menet.web.explorer import Networks


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory) -> "Networks":
    # Imported here, so that the tests of the server alone do without torch.
    from menet.commands.demo import QUICK
    from menet.training import train
    from menet.web.explorer import Networks

    folder: Path = tmp_path_factory.mktemp("networks")
    plan = replace(QUICK, images=400, epochs=1, estimated_epochs=1)
    for network in plan.networks:
        if network.folder in ("vanilla", "me-net", "me-net-low-p"):
            train(network.config(plan, 0), folder / network.folder)
    names = {"defended": "me-net", "bare": "vanilla", "certified": "me-net-low-p"}
    return Networks(**{key: str(folder / name) for key, name in names.items()})
