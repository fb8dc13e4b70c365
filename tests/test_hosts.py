"""Runs of one, two and four processes have the same bits, and continue in another number of them with fresh noise."""

import json
import shutil
import signal
import socket

import numpy as np
import pytest

import dpx
from tests import hosts, kills

# One process of pytest, because the tests share their runs. `make test` has two processes in tests/test_processes.py.
pytestmark = [pytest.mark.xdist_group("hosts"), pytest.mark.long]


def together(folder, program, number, codes):
    """Runs a program of tests/hosts.py in some processes. codes: how they must end; None if that does not matter."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    given = [(rank, number, port, folder, program) for rank in range(number)]
    workers = [kills.server().Process(target=hosts.run, args=arguments) for arguments in given]
    for worker in workers:
        worker.start()
    try:
        for rank, code in reversed(list(enumerate(codes))):
            if code is not None:
                workers[rank].join(timeout=300)
                said = (folder / f"{program}-{rank}").read_text()
                assert workers[rank].exitcode == code, (workers[rank].exitcode, said[-4000:])
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hosts")


@pytest.fixture(scope="module")
def noises(folder):
    """The noise of each step of each branch, by its name, after all runs."""
    hosts.keep(folder, "one", hosts.fit(folder, "one"))
    with pytest.raises(KeyError):
        hosts.fit(folder, "one-killed", dies=3, checkpoints=folder / "of one")
    together(folder, "four", 4, (None, None, None, -signal.SIGKILL))
    shutil.copytree(folder / "run", folder / "of four")
    together(folder, "four-again", 4, (0, 0, 0, 0))
    together(folder, "two", 2, (None, -signal.SIGKILL))
    of_four = {"data": hosts.Source()}
    hosts.keep(folder, "two-one", hosts.moved(folder, "two-one", None, folder / "of four", "steps 7 to 8", **of_four))
    return {path.stem: noise_of(path) for path in folder.glob("*.steps")}


def noise_of(path):
    """By steps, from the second line on, because a line has the sum of all noise so far."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {step: np.subtract(now, before) for (_, before), (step, now) in zip(lines, lines[1:], strict=False)}


def read(folder, name):
    return dict(np.load(folder / f"{name}.npz"))


@pytest.mark.usefixtures("noises")
@pytest.mark.parametrize("name", ["two", "four"])
def test_processes_have_the_bits_of_one(folder, name):
    """The run of four is that of which one process was killed, continued."""
    one, other = read(folder, "one"), read(folder, name)
    assert one["steps"] == hosts.STEPS and one["skipped"] == 0 and np.abs(one["w"]).max() > 0
    for name, leaf in one.items():
        np.testing.assert_array_equal(leaf, other[name])


@pytest.mark.usefixtures("noises")
def test_every_process_writes_its_shards(folder):
    for step in (8, 10):
        kept = {path.name for path in (folder / "run" / str(step)).rglob("ocdbt.process_*")}
        assert kept == {f"ocdbt.process_{rank}" for rank in range(4)}, kept


BRANCHES = {
    "one-two": (("one-killed", [1, 2, 3]), ("one-two", [5, 6, 7, 8, 9, 10])),
    "two-one": (("four-killed", [1, 2, 3, 4, 5]), ("four-two", [7]), ("two-one", [9, 10])),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_another_number_of_processes_uses_no_noise_twice(folder, noises, name):
    """From one to two, and from four to two to one: each skips the steps until the next checkpoint."""
    made = []
    for branch, steps in BRANCHES[name]:
        lines = [json.loads(line) for line in (folder / f"{branch}.steps").read_text().splitlines()]
        assert [step for step, _ in lines] == steps
        made += steps
        for step, noise in noises[branch].items():
            np.testing.assert_array_equal(noise, noises["one"][step])  # that of its number
    assert len(set(made)) == len(made)
    result = read(folder, name)
    key = dpx.secret_key(hosts.SEED)
    planned = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=2.0, sampling=hosts.SAMPLING, key=key)
    assert result["steps"] == hosts.STEPS and result["skipped"] == {"one-two": 2, "two-one": 4}[name]
    assert result["epsilon"] == dpx.epsilon(planned, hosts.STEPS, delta=1e-5, accountant="rdp", numbers=10)
