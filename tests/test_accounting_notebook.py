"""The accounting notebook runs from top to bottom, and its stored outputs are of its own cells."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebooks" / "accounting.ipynb"
FEWER = {
    "steps, rate, delta = 1_000": "steps, rate, delta = 25",
    "rate=0.01, steps=500": "rate=0.01, steps=15",
    "(16, 64, 256)": "(4, 16)",
    "points=8": "points=2",
    "[0.4, 1, 2, 4]": "[0.4, 2]",
}


@pytest.mark.long
def test_notebook_executes(monkeypatch):
    """Every cell, with fewer steps and points, in this process: a kernel takes 5 CPU seconds to start.

    Lines with % are for the kernel alone.
    """
    nbformat = pytest.importorskip("nbformat")
    matplotlib = pytest.importorskip("matplotlib")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    stored = [cell.outputs for cell in cells]
    assert any(stored) and not any(out.output_type == "error" for outputs in stored for out in outputs)
    for many, few in FEWER.items():
        assert sum(cell.source.count(many) for cell in cells) == 1, many
        for cell in cells:
            cell.source = cell.source.replace(many, few)
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict = {"__name__": "__main__"}
    with matplotlib.rc_context():
        matplotlib.use("agg")
        for number, cell in enumerate(cells):
            lines = ["" if line.startswith("%") else line for line in cell.source.splitlines()]
            exec(compile("\n".join(lines), f"cell {number}", "exec"), names)
            matplotlib.pyplot.close("all")  # as a kernel does after each cell
