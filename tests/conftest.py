"""The strictest jax: no silent rank or dtype promotion. (optax's Adam needs dtype promotion: see `promoting`.)"""

import gc
import os

import jax
import pytest

from tests.compiling import FLAGS

os.environ.setdefault("XLA_FLAGS", FLAGS)  # which the first computation reads
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_runtest_teardown(item, nextitem):
    """Forget the compiled programs of a file: each holds mappings of memory, of which a process may have 65,530."""
    if nextitem is None or nextitem.path != item.path:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield
