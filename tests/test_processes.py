"""Two processes of four devices each train as one device does, and resume after one of them was killed."""

import signal
import socket

import jax
import numpy as np
import pytest

import dpx
from tests import kills, processes

pytestmark = pytest.mark.xdist_group("processes")  # one process of pytest, because the tests share their runs


def start(folder, how):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    workers = [kills.server().Process(target=processes.run, args=(rank, port, folder, how)) for rank in range(2)]
    for worker in workers:
        worker.start()
    return workers


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The results of the whole run, of one with sharded parameters, and of the resumed one."""
    folder = tmp_path_factory.mktemp("processes")

    def wait(how, codes):
        workers = start(folder, how)
        try:
            for worker, code in reversed(list(zip(workers, codes, strict=True))):
                if code is not None:
                    worker.join(timeout=120)
                    said = (folder / f"{how}-{workers.index(worker)}").read_text()
                    assert worker.exitcode == code, (worker.exitcode, said[-4000:])
        finally:
            for worker in workers:
                worker.kill()
                worker.join()

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
