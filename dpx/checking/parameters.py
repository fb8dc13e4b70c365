"""The dtypes of the parameters."""

import jax
import jax.numpy as jnp

from dpx.checking.program import some
from dpx.checking.report import Finding
from dpx.trees import Tree, path_of


def dtypes(params: Tree) -> Finding:
    """Parameters without a real gradient."""
    found = [(path_of(path), jnp.result_type(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    wrong = [f"{path} ({dtype})" for path, dtype in found if not jnp.issubdtype(dtype, jnp.floating)]
    if wrong:
        words = f"{some(wrong)} have no real gradient: keep them out of the parameters (complex: two real arrays)"
        return Finding("parameter dtypes", "error", words, {"parameters": len(wrong)})
    return Finding("parameter dtypes", "ok", "all parameters are real floats", {"parameters": 0})


def is_low_precision(leaf: jax.Array) -> bool:
    """Whether a leaf has fewer than 32 bits."""
    return jnp.result_type(leaf).itemsize < 4
