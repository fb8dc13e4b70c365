"""One of several processes of one device each, which make runs with exact sums; tests/test_hosts.py starts them.

The sums of the gradients and the noise have few bits. So every number of devices must give the same parameters, in
every bit.
"""

import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import dpx
from dpx.sampling.data import MARKED_ITEMS
from tests.compiling import begin

STEPS = 10
SAMPLING = dpx.PoissonSampling(examples=48, batch_size=8)
ROWS = np.rint(4 * np.random.default_rng(0).normal(size=(48, 8))).astype(np.float32) / 64
SEED = 2**80 + 7


class Source:
    """A source that keeps what was read. first: added to row 0."""

    def __init__(self, first=0.0):
        self.read, self.first = [], first

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, number):
        self.read.append(number)
        return ROWS[number] + np.float32(self.first if number == 0 else 0.0)


def fit(folder: Path, name: str, mesh=None, *, dies=None, data=None, seed=SEED, **options):
    """A run that writes a line for each step: its number, and parameters that have no gradient, so noise alone.

    mesh: of all devices, over which the rows and "w" are sharded. dies: after so many steps, in the last process.
    """
    params, sharding, rank = {"free": np.zeros(2, np.float32), "w": np.zeros(8, np.float32)}, None, jax.process_index()
    if mesh is not None:
        sharding = NamedSharding(mesh, PartitionSpec("data"))
        layout = {"free": NamedSharding(mesh, PartitionSpec()), "w": sharding}
        params = jax.jit(lambda: jax.tree.map(jnp.asarray, params), out_shardings=layout)()

    def watch(progress):
        if rank == 0:
            with (folder / f"{name}.steps").open("a") as file:
                print(json.dumps([progress.step, np.asarray(progress.params["free"]).tolist()]), file=file)
        if progress.step == dies and rank == jax.process_count() - 1:
            if mesh is None:
                raise KeyError("a single process is not killed, because it is that of pytest")
            os.kill(os.getpid(), signal.SIGKILL)

    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=2.0, sampling=SAMPLING, key=dpx.secret_key(SEED))
    given = {"steps": STEPS, "delta": 1e-5, "accountant": "rdp", "evaluate_every": 1, "checkpoint_every": 2}
    return dpx.fit(
        lambda params, row: row @ params["w"] + 0.0 * params["free"].sum(),
        dpx.chain(mechanism, optax.sgd(0.5)),
        params,
        ROWS if data is None else data,
        key=dpx.secret_key(seed),
        callbacks=[watch],
        sharding=sharding,
        **given | options,
    )


def keep(folder: Path, name: str, result, mesh=None):
    """Of a finished run, in process 0: its parameters, and what else a test compares."""
    params = result.params
    if mesh is not None:
        everywhere = NamedSharding(mesh, PartitionSpec())
        assert params["w"].addressable_shards[0].data.shape == (8 // jax.process_count(),)
        params = jax.jit(lambda tree: tree, out_shardings=everywhere)(params)
    if jax.process_index() == 0:
        known = {"steps": result.steps, "epsilon": result.epsilon, "skipped": result.skipped}
        np.savez(folder / name, **{name: np.asarray(leaf) for name, leaf in params.items()}, **known)


def run(rank: int, hosts: int, port: int, folder: Path, program: str):
    """In a new process, in which jax has not computed anything yet. Its output goes to a file."""
    with (folder / f"{program}-{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    begin()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", hosts, rank, initialization_timeout=60)
    assert jax.device_count() == hosts and jax.local_device_count() == 1
    mesh = jax.make_mesh((hosts,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    PROGRAMS[program](folder, mesh)
    jax.distributed.shutdown()  # waits for the others


def four(folder: Path, mesh):
    """What is refused; then a run of which one process is killed."""
    require_refused(folder, mesh)
    fit(folder, "four-killed", mesh, dies=5, data=Source(), checkpoints=folder / "run")


def four_again(folder: Path, mesh):
    """The killed run, continued by as many processes."""
    own = Source()
    keep(folder, "four", fit(folder, "four", mesh, data=own, checkpoints=folder / "run"), mesh)
    require_own_rows(own, first=4)


def two(folder: Path, mesh):
    """All steps; a run of one process, continued by two; and the killed run of four, until one of two is killed."""
    own = Source()
    keep(folder, "two", fit(folder, "two", mesh, data=own), mesh)
    require_own_rows(own, first=0)
    keep(folder, "one-two", moved(folder, "one-two", mesh, folder / "of one", "steps 3 to 4"), mesh)
    moved(folder, "four-two", mesh, folder / "of four", "steps 5 to 6", dies=7, data=Source())


def moved(folder: Path, name: str, mesh, checkpoints: Path, skipped: str, **options):
    """A run that continues in another number of processes. Without `on_other_devices`, `fit` refuses it."""
    import pytest

    number = "None" if mesh is None else str(mesh.size)
    with pytest.raises(ValueError, match=f"devices was .*, now {number}; .*, or on_other_devices=True, which"):
        fit(folder, name, mesh, checkpoints=checkpoints, data=options.get("data"))
    with pytest.warns(UserWarning, match=skipped):
        return fit(folder, name, mesh, checkpoints=checkpoints, on_other_devices=True, **options)


def require_own_rows(source: Source, first: int):
    """This process read the rows of its own device alone, and those that every process marks."""
    rank, hosts = jax.process_index(), jax.process_count()
    marked = set(np.linspace(0, len(ROWS) - 1, MARKED_ITEMS).astype(int).tolist())
    size, others, own = SAMPLING.usual_rows // hosts, set(), set()
    for step in range(first, STEPS):
        drawn = SAMPLING.draw(dpx.secret_key(SEED), step).indices
        own |= set(drawn[rank * size : (rank + 1) * size].tolist())
        others |= set(drawn.tolist())
    assert set(source.read) == own | marked and not others <= set(source.read)


def require_refused(folder: Path, mesh):
    """Where one of the processes differs, every process says so, by name."""
    last = jax.process_index() == jax.process_count() - 1
    cases = {
        "key of the batches (its mark) is": {"seed": SEED + last},
        "data must hold the 48 examples of the sampling, got 40": {"data": ROWS[:40] if last else ROWS},
        "some examples of the data (their mark) is": {"data": Source(1.0 if last else 0.0)},
    }
    for words, options in cases.items():
        try:
            fit(folder, "refused", mesh, checkpoints=folder / "refused", **options)
        except ValueError as error:
            assert words in str(error), (words, str(error))
        else:
            raise AssertionError(f"passed: {words}")
    assert not (folder / "refused").exists() and not (folder / "refused.steps").exists()


PROGRAMS = {"four": four, "four-again": four_again, "two": two}
