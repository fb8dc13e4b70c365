"""Two processes of four devices each train as one device does, and resume after one of them was killed."""

import os
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import dpx
from tests import processes

pytestmark = pytest.mark.xdist_group("processes")  # one process of pytest, because the tests share their runs


def start(root, folder, how):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root)}
    workers = []
    for rank in range(2):
        command = [sys.executable, "-m", "tests.processes", str(rank), str(port), str(folder), how]
        with (folder / f"{how}-{rank}").open("w") as errors:
            workers.append(subprocess.Popen(command, env=environment, cwd=root, stdout=errors, stderr=errors))
    return workers


@pytest.fixture(scope="module")
def runs(pytestconfig, tmp_path_factory):
    """The results of the whole run, of one with sharded parameters, and of the resumed one."""
    folder = tmp_path_factory.mktemp("processes")

    def wait(how, codes):
        workers = start(pytestconfig.rootpath, folder, how)
        try:
            for worker, code in reversed(list(zip(workers, codes, strict=True))):
                if code is not None:
                    found = worker.wait(timeout=120)
                    assert found == code, (found, (folder / f"{how}-{workers.index(worker)}").read_text()[-4000:])
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()

    wait("train", (None, -signal.SIGKILL))  # the first waits for the second, in vain
    wait("resume", (0, 0))
    return {name: dict(np.load(folder / f"{name}.npz")) for name in ("whole", "wide", "resumed")}


def test_two_processes_train_as_one_device(runs):
    made = processes.optimizer()[1]
    params = jax.tree.map(jax.numpy.asarray, processes.PARAMS)
    params, state = processes.train(processes.step_function(), params, made.init(params))
    for run in ("whole", "wide"):
        for name, leaf in params.items():
            np.testing.assert_allclose(runs[run][name], leaf, atol=1e-6)
        assert runs[run]["epsilon"] == dpx.epsilon(made, state, delta=1e-5) and runs[run]["steps"] == 5


def test_a_run_resumes_after_a_process_was_killed(runs):
    for name, array in runs["whole"].items():
        np.testing.assert_array_equal(runs["resumed"][name], array)
