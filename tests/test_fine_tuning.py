"""The code of docs/fine_tuning.md runs as it stands, is short, and does what the page says."""

import pathlib
import re

import jax
import numpy as np
import pytest

import dpx

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "fine_tuning.md").read_text()


@pytest.mark.long
def test_fine_tuning(promoting, capsys):
    model, *rest = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert sum(bool(line.strip()) for line in "".join(rest).splitlines()) <= 40
    names = {}
    with jax.numpy_rank_promotion("allow"):
        exec(model + rest[0], names)
        before = jax.tree.map(np.copy, names["params"])
        exec("".join(rest[1:]), names)
    *table, rounding, last = capsys.readouterr().out.splitlines()
    (shown,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    first = [" ".join(line.split()) for line in table if "['blocks'][0]" in line or "head" in line]
    assert first == [" ".join(line.split()) for line in shown.splitlines()]

    def is_trained(path, _):
        return names["is_trained"](jax.tree_util.keystr(path, simple=True, separator="/"))

    assert "rounding" in rounding
    flags = jax.tree.leaves(jax.tree_util.tree_map_with_path(is_trained, before))
    ways = [re.sub(r"^\S+\s+", "", line) for line in table]
    assert [way == "not trained" for way in ways] == [not flag for flag in flags] and len(table) == len(flags)
    assert {way for way in ways if way != "not trained"} == {"norm from Gram matrices", "norm from |input| |cotangent|"}

    after, state = names["params"], names["state"]
    moved = [(old != new).any() for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)]
    assert moved == flags and sum(flags) == 5
    trained = sum(leaf.size for leaf, flag in zip(jax.tree.leaves(before), flags, strict=True) if flag)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.transforms) if leaf.ndim) == 2 * trained
    accuracy, epsilon = (float(number) for number in re.findall(r"\d\.\d+", last))
    assert accuracy > 0.7 and epsilon == pytest.approx(3.0, abs=0.02)
    assert dpx.epsilon(names["optimizer"], state, delta=1e-5) <= 3
