"""Write examples/tutorial.ipynb from docs/tutorial.md: python docs/make_notebook.py. A test holds them equal."""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, NOTEBOOK = ROOT / "docs" / "tutorial.md", ROOT / "examples" / "tutorial.ipynb"


def notebook_of(page: str) -> dict[str, Any]:
    """The page as a notebook: Python blocks become code cells, everything between them text."""
    cells = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page, flags=re.MULTILINE | re.DOTALL)):
        text = part.strip("\n")
        if number % 2:
            code = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
        else:
            code = {"cell_type": "markdown", "metadata": {}}
            # Other pages are beside the tutorial, and the notebook is not.
            text = re.sub(r"\]\((?!https?:|#)([^)]+)\)", r"](../docs/\1)", text)
        if text:
            cells.append({**code, "id": f"cell-{number}", "source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def text_of(page: str) -> str:
    """The notebook as the text of its file."""
    return json.dumps(notebook_of(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(text_of(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
