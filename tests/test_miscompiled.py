"""XLA's fault that mixes rows: turned off by `import dpx`, and refused where it is on."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import dpx
from dpx.xla import rows_apart

needs_the_fault = pytest.mark.skipif(
    not rows_apart.is_suspected_version() or jax.default_backend() != "cpu",
    reason="this jaxlib does not have the fault",
)
WITH_IT = f"--{rows_apart.FLAG}=+reduce"
PROGRAM = """
import sys
import jax
if sys.argv[1] == "early":
    jax.devices()
import dpx
from dpx.xla.rows_apart import has_row_mixing_fault
print(has_row_mixing_fault())
dpx.keys.release(jax.random.key(0), 0, jax.numpy.zeros(3), 1.0)
"""


def run(when: str, flags: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"XLA_FLAGS": flags}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, when], env=environment, capture_output=True, text=True
    )


def test_rows_do_not_mix_here():
    assert not rows_apart.has_row_mixing_fault()
    with jax.disable_jit():  # as for a debugger
        assert not rows_apart.has_row_mixing_fault()


@needs_the_fault
def test_an_import_turns_the_fault_off_and_a_release_refuses_it():
    with_it = run("", WITH_IT)
    assert with_it.stdout == "True\n" and "mixes the rows of a batch on this CPU" in with_it.stderr
    early = run("early", "")
    assert (early.returncode == 0) == (early.stdout == "False\n")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", f"--{rows_apart.FLAG}=-reduce"),
        ("--xla_dump_to=x word", f"--{rows_apart.FLAG}=-reduce --xla_dump_to=x word"),
        (WITH_IT, WITH_IT),
        ("/some/file", "/some/file"),
    ],
)
def test_the_flag_is_added_to_what_is_there(monkeypatch, flags, expected):
    monkeypatch.setattr(rows_apart, "is_suspected_version", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", flags)
    rows_apart.disable_row_mixing()
    assert os.environ["XLA_FLAGS"] == expected
    monkeypatch.setattr(rows_apart, "is_suspected_version", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "")
    rows_apart.disable_row_mixing()
    assert os.environ["XLA_FLAGS"] == ""


def test_which_versions_are_suspected():
    suspected = ["0.10.2", "0.11.0", "0.11.1"]
    assert all(map(rows_apart.is_suspected_version, suspected))
    assert not any(map(rows_apart.is_suspected_version, ["0.10.1", "0.9.2", "0.12.0", "0.12.0.1", "1.0.0"]))


def test_a_release_refuses_rows_that_mix(monkeypatch):
    monkeypatch.setattr(rows_apart, "is_suspected_version", lambda: True)
    monkeypatch.setattr(rows_apart, "has_row_mixing_fault", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    rows_apart.require_rows_apart.cache_clear()
    with pytest.raises(ValueError, match="mixes the rows of a batch"):
        dpx.keys.release(jax.random.key(0), 0, np.zeros(3, np.float32), 1.0)
    rows_apart.require_rows_apart.cache_clear()
