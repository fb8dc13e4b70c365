"""The code of the README and of docs/loops.md runs as it stands; the README's is short."""

import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LOOPS = (ROOT / "docs" / "loops.md").read_text()


def test_readme(promoting, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 15
    with jax.numpy_rank_promotion("allow"):
        exec(code, {})
    _, accuracy, *_, epsilon = capsys.readouterr().out.split()
    assert float(epsilon) == pytest.approx(2.0, abs=0.02) and float(epsilon) <= 2.0
    assert float(accuracy.removesuffix("%")) > 90


def test_loops(promoting):
    """The blocks state by themselves what they hold; later blocks use the names of earlier ones."""
    names = {}
    with jax.numpy_rank_promotion("allow"):
        for block in re.findall(r"```python\n(.*?)```", LOOPS, re.DOTALL):
            exec(block, names)
    assert sum(line.startswith("assert ") for line in LOOPS.splitlines()) >= 7
