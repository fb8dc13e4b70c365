"""The code of README.md, docs/loops.md, docs/papers and docs/ship_it.md runs as it stands; the README's is short."""

import json
import pathlib
import re

import jax
import numpy as np
import pytest

import dpx

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LOOPS = (ROOT / "docs" / "loops.md").read_text()
PAPERS = sorted((ROOT / "docs" / "papers").glob("*.md"))
SHIP_IT = (ROOT / "docs" / "ship_it.md").read_text()


def test_readme(promoting, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 15
    with jax.numpy_rank_promotion("allow"):
        exec(code, {})
    _, accuracy, *_, epsilon = capsys.readouterr().out.split()
    assert float(epsilon) == pytest.approx(2.0, abs=0.02) and float(epsilon) <= 2.0
    assert float(accuracy.removesuffix("%")) > 90


@pytest.mark.long
def test_loops(promoting):
    """The blocks state by themselves what they hold; later blocks use the names of earlier ones."""
    names = {}
    with jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", LOOPS, re.DOTALL):
            exec(block, names)
    assert sum(line.startswith("assert ") for line in LOOPS.splitlines()) >= 7


@pytest.mark.long
def test_papers(promoting):
    """Every method of the pages meets the budget that it was given, and has a key of its own."""
    mechanisms = []
    for page in PAPERS:
        names = {}
        exec("".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)), names)
        mechanisms += [value for value in names.values() if isinstance(value, dpx.Mechanism)]
    bills = [dpx.epsilon(mechanism, mechanism.budget.steps, delta=1e-5) for mechanism in mechanisms]
    assert len(bills) == 8 and 1.9 < min(bills) and max(bills) <= 2.0
    assert len({jax.random.key_data(mechanism.key).tobytes() for mechanism in mechanisms}) == 8


@pytest.mark.parametrize("page", PAPERS, ids=lambda path: path.stem)
def test_pages_of_papers_have_the_same_parts(page):
    text = page.read_text()
    parts = ["Claim", "What holds", "The bill", "Our evidence", "When to use it"]
    assert [name for name in re.findall(r"^\*\*([A-Z][^.*]*)\.?\*\*", text, re.MULTILINE) if name in parts][:5] == parts
    assert "../../benchmarks/results/" in text and page.name in (ROOT / "docs" / "papers.md").read_text()


def test_ship_it(promoting):
    """The folder holds the parameters, the report and a state without unreleased values and keys."""
    names = {}
    with jax.numpy_rank_promotion("allow"):
        exec("".join(re.findall(r"```python\n(.*?)```", SHIP_IT, re.DOTALL)), names)
    folder, result = names["folder"], names["result"]
    assert {path.name for path in folder.iterdir()} == {
        "params.npz",
        "state.npz",
        "privacy_report.json",
        "privacy_report.md",
        "privacy_report.html",
    }
    stored = np.load(folder / "params.npz")
    assert all(np.array_equal(stored[name], leaf) for name, leaf in result.params.items())
    report = json.loads((folder / "privacy_report.json").read_text())
    assert report["epsilon"]["pld"] == result.epsilon and report["tuning"] != result.report.tuning
    state = np.load(folder / "state.npz", allow_pickle=False)
    assert state.files and not any("unreleased" in name for name in state.files)
