"""Two processes of four devices each train as one device does, and resume after one of them was killed."""

import json
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import dpx
from tests import kills, processes
from tests.problems import ROOT

pytestmark = pytest.mark.xdist_group("processes")  # one process of pytest, because the tests share their runs


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(folder, how):
    port = free_port()
    workers = [kills.server().Process(target=processes.run, args=(rank, port, folder, how)) for rank in range(2)]
    for worker in workers:
        worker.start()
    return workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


def wait(folder, how, codes):
    """Both processes, with the codes by which they must end; None if that does not matter."""
    workers = start(folder, how)
    try:
        for worker, code in reversed(list(zip(workers, codes, strict=True))):
            if code is not None:
                worker.join(timeout=300)
                said = (folder / f"{how}-{workers.index(worker)}").read_text()
                assert worker.exitcode == code, (worker.exitcode, said[-4000:])
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def read(folder, name):
    return dict(np.load(folder / f"{name}.npz"))


@pytest.fixture(scope="module")
def runs(folder):
    """The results of the whole run, and of one by `fit` that was killed and resumed."""
    wait(folder, "train", (None, -signal.SIGKILL))  # the first waits for the second, in vain
    wait(folder, "resume", (0, 0))
    return {name: read(folder, name) for name in ("whole", "fit")}


@pytest.fixture(scope="module")
def one_device():
    """The parameters and the epsilon of the same five steps."""
    made = processes.optimizer()[1]
    params = jax.tree.map(jax.numpy.asarray, processes.PARAMS)
    params, state = processes.train(processes.step_function(), params, made.init(params))
    return params, dpx.epsilon(made, state, delta=1e-5)


def require_same(run, one_device):
    params, epsilon = one_device
    for name, leaf in params.items():
        np.testing.assert_allclose(run[name], leaf, atol=1e-6)
    assert run["epsilon"] == epsilon and run["steps"] == 5


def test_two_processes_train_as_one_device(runs, one_device):
    require_same(runs["whole"], one_device)


@pytest.fixture(scope="module")
def by_hand(folder):
    wait(folder, "by hand", (0, 0))


@pytest.mark.long
def test_sharded_parameters_and_a_run_by_hand_that_resumes(runs, by_hand, one_device, folder):
    require_same(read(folder, "wide"), one_device)
    for name, array in runs["whole"].items():
        np.testing.assert_array_equal(read(folder, "resumed")[name], array)


@pytest.mark.long
def test_the_program_of_the_page_resumes(tmp_path, monkeypatch):
    """docs/devices.md: both processes are killed after a checkpoint, and started again by the same command."""
    (code,) = re.findall(r"`train.py`.*?```py\n(.*?)```", (ROOT / "docs" / "devices.md").read_text(), re.DOTALL)
    assert code.count("localhost:2345") == 1
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("SEED", str(2**100 + 1))

    def begin():
        (tmp_path / "train.py").write_text(code.replace("localhost:2345", f"localhost:{free_port()}"))
        how = {"cwd": tmp_path, "text": True, "stdout": subprocess.PIPE}
        return [subprocess.Popen([sys.executable, "train.py", str(rank)], **how) for rank in range(2)]

    running, limit = begin(), time.monotonic() + 300
    try:
        while not (tmp_path / "shared" / "30").is_dir():
            assert time.monotonic() < limit and all(process.poll() is None for process in running)
            time.sleep(0.05)
        stop(running)
        assert not (tmp_path / "shared" / "100").exists()
        running = begin()
        said = [process.communicate(timeout=300)[0].splitlines()[-1] for process in running]
    finally:
        stop(running)
    assert said[0] == said[1] and said[0].startswith("100 steps: ")


def stop(running):
    for process in running:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.long
def test_correlated_noise_in_two_processes_is_that_of_one_device(by_hand, folder):
    one, two = (json.loads((folder / f"banded-{rank}").read_text()) for rank in range(2))
    alone = processes.fit(made=processes.banded(), key=dpx.secret_key(7))
    assert one == two and one["steps"] == alone.steps == 5 and one["epsilon"] == alone.epsilon
    for name, leaf in alone.params.items():
        np.testing.assert_allclose(np.load(folder / "banded.npz")[name], leaf, atol=1e-6)


@pytest.mark.long
def test_cut_batches_in_chunks_have_the_bits_of_one_device(by_hand, folder):
    """`most_rows` cuts batches by a second stream of the key, which all processes must draw alike."""
    free = dpx.PoissonSampling(examples=64, batch_size=16)
    assert max(free.draw(processes.optimizer()[0], step).included.sum() for step in range(3)) > 16
    expected = processes.train_on_cut_batches()
    for rank in range(2):
        np.testing.assert_array_equal(np.load(folder / f"cut-{rank}.npy"), expected)


def test_fit_in_two_processes_is_the_loop_by_hand(runs, folder):
    """It was ended by a callback of one process, then by kill -9, and resumed. Every process knows the whole result."""
    for name, array in runs["fit"].items():
        np.testing.assert_array_equal(array, runs["whole"][name])
    one, two = (json.loads((folder / f"fit-{rank}").read_text()) for rank in range(2))
    assert one == two
    alone = processes.fit()
    assert one["steps"] == alone.steps and one["epsilon"] == alone.epsilon and one["report"] == alone.report.to_json()
    assert [row["step"] for row in one["history"]] == [2, 4, 5]
    assert all(row["process"] == 0 for row in one["history"])  # the metrics of process 0 count
    kept = {path.name for path in (folder / "fit").iterdir()}
    assert kept == {"SENSITIVE", "lock", "run.json", "history.json", "3", "5"}
    with pytest.raises(ValueError, match="processes was 2, now None"):
        processes.fit(checkpoints=folder / "fit")
    said = [(folder / f"train-{rank}").read_text() for rank in range(2)]
    assert "(not private)" in said[0] and "(not private)" not in said[1]  # the progress bar of process 0
