"""The code of docs/language_models.md runs as it stands, is short, and does what the page says."""

import pathlib
import re

import jax
import pytest

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "language_models.md").read_text()


@pytest.mark.long
def test_language_models(promoting, capsys):
    blocks, names = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), {}
    assert len(blocks) == 4 and sum(bool(line.strip()) for line in "".join(blocks).splitlines()) <= 45
    with jax.numpy_rank_promotion("allow"):
        exec("".join(blocks), names)
    said = capsys.readouterr().out
    assert "(2, 17) [17 17] [ True  True]" in said and "one page" in said
    assert 0 < names["result"].epsilon <= 8 and len(names["texts"]) == 3
    moved = jax.tree_util.tree_map_with_path(
        lambda path, old, new: bool((old != new).any()) == ("lora_" in jax.tree_util.keystr(path)),
        names["params"],
        names["result"].params,
    )
    assert all(jax.tree.leaves(moved))
