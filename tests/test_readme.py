"""The README's code runs as it stands, and it is short."""

import pathlib
import re

import jax
import pytest

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()


def test_readme(promoting, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.strip().splitlines()) <= 21  # 19 and two blank lines
    with jax.numpy_rank_promotion("allow"):
        exec(code, {})
    epsilon = float(capsys.readouterr().out.split()[-1])
    assert epsilon == pytest.approx(2.0, abs=0.02) and epsilon <= 2.0
