"""The strictest jax: no silent rank or dtype promotion. (optax's Adam needs dtype promotion: see `promoting`.)"""

import gc
import os

import jax
import pytest

from tests.compiling import FLAGS

os.environ.setdefault("XLA_FLAGS", FLAGS)  # which the first computation reads
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

gc.set_threshold(100_000, 20, 100)  # tracing makes many objects that stay: a twentieth of the time


@pytest.fixture
def promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield
