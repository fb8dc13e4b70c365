"""The strictest jax: no silent rank or dtype promotion. (optax's Adam needs dtype promotion: see `promoting`.)"""

import gc
import os
from pathlib import Path

import jax
import pytest

from tests.compiling import FLAGS, share_contexts

os.environ.setdefault("XLA_FLAGS", FLAGS)  # which the first computation reads
share_contexts()
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 25_000  # of memory; Linux allows a process 65,530, and a compiled program holds some


def pytest_runtest_teardown(item, nextitem):
    """After a file, forget the compiled programs if they hold many mappings of memory."""
    if nextitem is None or nextitem.path == item.path or not MAPPINGS.exists():
        return
    if MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield
