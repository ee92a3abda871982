"""One report with everything in it, drawn once for all tests."""

from pathlib import Path

import pytest
from report_samples import HOSTILE, sample

from menet.report.collect import Collection, collect
from menet.report.page import Report, render_html, report_of


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample(tmp_path_factory.mktemp("records"), HOSTILE)


@pytest.fixture(scope="session")
def collection(folder: Path) -> Collection:
    return collect(folder)


@pytest.fixture(scope="session")
def report(collection: Collection) -> Report:
    return report_of(collection)


@pytest.fixture(scope="session")
def whole(report: Report) -> str:
    """The page, as text."""
    return render_html(report)
