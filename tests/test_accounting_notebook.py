"""The accounting notebook runs from top to bottom, and its stored outputs are of its own cells."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebooks" / "accounting.ipynb"


@pytest.mark.filterwarnings("ignore")  # of the notebook machinery; the notebook's own are errors inside its kernel
def test_notebook_executes():
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("matplotlib")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    stored = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert any(stored) and not any(out.output_type == "error" for outputs in stored for out in outputs)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("import warnings; warnings.simplefilter('error')"))
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
