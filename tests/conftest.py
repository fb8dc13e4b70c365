"""The strictest jax: no silent rank or dtype promotion. (optax's Adam needs dtype promotion: see `promoting`.)"""

import gc
import os
import sys
import threading
from pathlib import Path

import jax
import pytest

from dpx import keys
from dpx.audit.stand_ins import drawing_normals_by
from dpx.gradients.ghost import plan
from tests.compiling import FLAGS, KEPT, hurry, keep_programs

if FLAGS not in (given := os.environ.get("XLA_FLAGS", "")):  # to which `import dpx` may have added
    os.environ["XLA_FLAGS"] = f"{FLAGS} {given}".strip()  # the first computation reads them, and the last of two counts
hurry()
keep_programs()
jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")  # also where there is a GPU
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
LEAST_SAVED, plan.LEAST_SAVED = plan.LEAST_SAVED, 0.0  # the models of the tests are small, and stand for large ones

MAPPINGS = Path("/proc/self/maps")
MOST_MAPPINGS = 25_000  # of memory; Linux allows a process 65,530, and a compiled program holds some


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Marks as long the cases whose ids begin as `long_cases` says. A word that begins no id is an error."""
    unused = {}
    for item in items:
        for words in (mark.args for mark in item.iter_markers("long_cases")):
            begun = {word for word in words if item.callspec.id.startswith(word)}
            test = item.nodeid.partition("[")[0]
            unused[test] = unused.get(test, {*words}) - begun
            if begun:
                item.add_marker("long")
    whole = not any("::" in argument for argument in config.args)  # else some cases are not collected
    if whole and any(unused.values()):
        raise pytest.UsageError(f"long_cases that are no cases: { ({k: v for k, v in unused.items() if v}) }")


def pytest_collection_finish():
    """The modules and the tests stay until the end: no search looks at them again."""
    gc.freeze()


def pytest_runtest_teardown(item, nextitem):
    """After a file, close its figures, and forget the compiled programs if they hold many mappings of memory."""
    if nextitem is not None and nextitem.path != item.path and "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
    if nextitem is None or nextitem.path == item.path or not MAPPINGS.exists():
        return
    if MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        KEPT.clear()
        jax.clear_caches()
        gc.collect()


def pytest_sessionfinish():
    """One search for garbage, which may warn; pytest and Python search several times more, and find nothing."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def ungridded():
    """Releases are sums plus noise in floating point, without the grid: to compare with formulas of real numbers."""
    with drawing_normals_by(keys.normals_of_release):
        yield


@pytest.fixture
def exact_noise(monkeypatch):
    """Bills without what the arithmetic of the noise adds: the accountants' own numbers, to compare many digits of."""
    arithmetic = pytest.importorskip("dpx.accounting.arithmetic")
    nothing = arithmetic.finite_precision_cost(0, 0.0)
    monkeypatch.setattr(arithmetic, "_best_lemma_2", lambda *_: nothing)


@pytest.fixture
def undrawn(monkeypatch):
    """Plots are made and not drawn, because a plot takes a third of a second and a test reads few of them."""
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(figure.Figure, "savefig", lambda *arguments, **options: None)


def threads():
    """Those that load batches ahead."""
    return [thread for thread in threading.enumerate() if thread.name == "dpx batches"]


@pytest.fixture
def no_thread_is_left():
    yield
    if threads():  # because a collection takes half a second when many programs are compiled
        gc.collect()
    assert not threads()
