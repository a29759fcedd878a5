"""The tutorial runs as it stands, and shows what it says."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"


def test_tutorial_runs_and_its_saved_model_answers_the_same() -> None:
    notebook = nbformat.read(TUTORIAL, as_version=4)
    assert any(cell.get("outputs") for cell in notebook.cells), "execute it before it is committed"
    NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    last = [cell for cell in notebook.cells if cell.cell_type == "code"][-1]
    assert last.outputs[0].text == "True\n"
