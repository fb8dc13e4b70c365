"""The small problems that many tests share: a sampling, DP-SGD on it, data, losses, and the code of a page."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpx

ROOT = Path(__file__).parents[1]
KEY = jax.random.key(0)


def poisson(examples: Any = 1000, batch_size: Any = 8, **options: Any) -> dpx.PoissonSampling:
    return dpx.PoissonSampling(examples=examples, batch_size=batch_size, **options)


POISSON = poisson()
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="expects the programs that a CPU gets")


def dp_sgd(
    sampling: Any = POISSON, noise_multiplier: Any = 1.0, *, clip_norm: Any = 1.0, key: Any = KEY
) -> dpx.Mechanism:
    return dpx.dp_sgd(clip_norm=clip_norm, noise_multiplier=noise_multiplier, sampling=sampling, key=key)


def normal(seed: int, *shape: int) -> np.ndarray:
    """float32 numbers of N(0, 1)."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def inner_product(params, x):
    """Its gradient in w is x, whatever the parameters."""
    return jnp.sum(params["w"] * x)


def squared_distance(params, x):
    """Its gradient in w is 2 (w - x)."""
    return jnp.sum((params["w"] - x) ** 2)


def squared_error(params, example):
    """Of linear regression with a bias."""
    x, y = example
    return jnp.sum((x @ params["w"] + params["b"] - y) ** 2)


def cross_entropy(params, example):
    """Of logistic regression with a bias, for a label that is an integer."""
    x, label = example
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"], label)


def same(one: Any, other: Any):
    """Both trees have the same arrays, bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        left, right = jnp.asarray(left), jnp.asarray(right)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)


@contextmanager
def cut_at(step: int, error: type[BaseException] = KeyboardInterrupt) -> Iterator[None]:
    """The run inside ends by this error when it draws the Poisson batch of a step."""
    draw = dpx.PoissonSampling.draw

    def cut(self, key, at, **options):
        if at == step:
            raise error
        return draw(self, key, at, **options)

    with mock.patch.object(dpx.PoissonSampling, "draw", cut), pytest.raises(error):
        yield


def python_of(page: str | Path, *, section: str = "") -> list[str]:
    """The blocks of Python of a page, whose path begins at the root of the repository; section: those after this."""
    text = (ROOT / page).read_text()
    return re.findall(r"```python\n(.*?)```", text[text.index(section) :], re.DOTALL)


@contextmanager
def as_a_user() -> Iterator[None]:
    """jax with the promotions that it has by default, and that the other tests refuse."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def run_page(page: str | Path, names: dict | None = None) -> dict:
    """Runs the Python of a page, and returns its names. names: those that it begins with."""
    names = {} if names is None else names
    with as_a_user():
        exec("".join(python_of(page)), names)
    return names


def run_notebook(name: str, changes: dict[str, str]) -> dict:
    """Runs the cells of a notebook in this process, and returns their names: a kernel takes 5 CPU seconds to start.

    changes: from what it has once to what takes less time. Lines with % are for the kernel alone.
    """
    cells = json.loads((ROOT / "examples" / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    program = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for many, few in changes.items():
        assert program.count(many) == 1, many
        program = program.replace(many, few)
    names: dict = {"__name__": "__main__"}
    with as_a_user():
        exec(compile(re.sub("^%.*", "", program, flags=re.MULTILINE), name, "exec"), names)
    return names
