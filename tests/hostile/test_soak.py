"""The quick part of `make soak`: a few damaged files of each format, and one kill."""

import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent / "soak.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_few_of_each_format_survive(tmp_path):
    document = tmp_path / "reliability.md"
    document.write_text("before\n<!-- soak -->\nan earlier table\n<!-- /soak -->\nafter\n")
    command = [sys.executable, str(SOAK), "--mutations", "5", "--kills", "0", "--write", str(document)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    text = document.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "an earlier table" not in text
    assert "| weights | 5 | 5 | 0 |" in text


def test_a_finding_is_reported(tmp_path):
    """A reader that raises anything but the project's own error, or accepts damage, is a finding."""
    sys.path.insert(0, str(SOAK.parent))
    try:
        from soak import mutate
    finally:
        sys.path.pop(0)
    file = tmp_path / "file"
    file.write_bytes(b"0123456789" * 5)

    def careless() -> int:
        content = file.read_bytes()
        if len(content) < 50:
            raise IndexError
        return 1 + len(content)

    found = mutate("careless", file, careless, 40)
    assert found.tried == 40
    assert any("IndexError" in words for words in found.findings)
    assert any("accepted with another content" in words for words in found.findings)
    assert mutate("careful", file, file.exists, 5).findings == []
