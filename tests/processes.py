"""One of two processes that train together on four devices each; tests/test_processes.py starts and kills them."""

import contextlib
import json
import os
import signal
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import dpx
from dpx.fitting.folder import Folder
from tests.compiling import begin

STEPS = 5


class FewRows(dpx.PoissonSampling):
    usual_rows = 24  # batches that exceed it are tested too


SAMPLING = FewRows(examples=64, batch_size=16)
CUT = dpx.PoissonSampling(examples=64, batch_size=16, most_rows=16)
RANDOM = np.random.default_rng(0)
DATA = {"x": RANDOM.normal(size=(64, 4)).astype(np.float32), "y": RANDOM.normal(size=64).astype(np.float32)}
PARAMS = {
    "w1": RANDOM.normal(size=(4, 8)).astype(np.float32),
    "b1": np.zeros(8, np.float32),
    "w2": RANDOM.normal(size=8).astype(np.float32),
    "b2": np.zeros((), np.float32),
}
WIDE = {
    "w1": PartitionSpec(None, "data"),
    "b1": PartitionSpec("data"),
    "w2": PartitionSpec("data"),
    "b2": PartitionSpec(),
}


def loss(params, example):
    hidden = jnp.tanh(example["x"] @ params["w1"] + params["b1"])
    return (hidden @ params["w2"] + params["b2"] - example["y"]) ** 2


def optimizer(seed=7) -> tuple[jax.Array, dpx.Mechanism]:
    key = dpx.secret_key(seed)
    mechanism = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=SAMPLING, key=key)
    return key, dpx.chain(mechanism, optax.sgd(0.5, momentum=0.9))


class Source:
    """A source that counts what is read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 64

    def __getitem__(self, number):
        self.read.append(number)
        return {name: rows[number] for name, rows in DATA.items()}


def step_function(shardings=None):
    """A jitted step. shardings: of the parameters and the state."""
    gradient = dpx.private_updates(loss, optimizer()[1])

    def step(params, batch, state):
        updates, state, _ = gradient(params, batch, state)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, out_shardings=shardings)


def train(step, params, state, *, sharding=None, after_step=lambda steps, params, state: None):
    """The rest of the five steps from `state`."""
    left = STEPS - dpx.accounting.steps_taken(state)
    for batch in SAMPLING.batches(DATA, optimizer()[0], state, steps=left, sharding=sharding):
        params, state = step(params, batch, state)
        after_step(dpx.accounting.steps_taken(state), params, state)
    return params, state


def train_on_cut_batches(params=None, **options):
    """Three steps in chunks of 8 rows, on gradients whose sums are exact: the parameters, float32 (4,)."""
    key, data = optimizer()[0], np.rint(4 * DATA["x"]) / 64
    made = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=CUT, key=key)
    step, state = dpx.private_updates_in_chunks(lambda params, row: row @ params, made), made.init(np.zeros(4, "f4"))
    add, release = jax.jit(step.add), jax.jit(step.release)
    params = np.zeros(4, np.float32) if params is None else params
    for chunks in CUT.batches(data, key, state, steps=3, chunk_size=8, **options):
        sums = None
        for chunk in chunks:
            sums = add(params, chunk, state, sums)
        updates, state = release(params, sums, state)
        params = optax.apply_updates(params, updates)
    return np.asarray(params)


def fit(params=PARAMS, data=DATA, made=None, **options):
    """The same five steps by `dpx.fit`."""
    evaluate = {"evaluate": lambda params: jnp.mean(jnp.tanh(DATA["x"] @ params["w1"])), "evaluate_every": 2}
    terms = {"steps": STEPS, "delta": 1e-5, "accountant": "rdp"} | evaluate
    return dpx.fit(loss, made or optimizer()[1], params, data, **terms | options)


def banded() -> dpx.Mechanism:
    """With a memory of the last two noises."""
    groups = dpx.sampling.CyclicPoissonSampling(examples=64, batch_size=8, bands=3)
    given = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": groups, "key": dpx.secret_key(7)}
    return dpx.chain(dpx.methods.band_mf_sgd(bands=3, steps=STEPS, **given), optax.sgd(0.5))


def run(rank: int, port: int, folder: Path, how: str):
    """In a new process, in which jax has not computed anything yet. Its output goes to a file."""
    with (folder / f"{how}-{rank}").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    begin(4)
    train_in_two(rank, port, folder, how)
    jax.distributed.shutdown()  # waits for the other process


def train_in_two(rank: int, port: int, folder: Path, how: str):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, rank, initialization_timeout=60)
    assert jax.device_count() == 8 and jax.local_device_count() == 4
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    made = optimizer()[1]

    def begin(specs=None):
        """Parameters, state, and the shardings of both; the momentum is sharded like the parameters."""
        layout = jax.tree.map(lambda _: everywhere, PARAMS)
        if specs is not None:
            layout = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        shapes = jax.eval_shape(made.init, PARAMS)
        layouts = optax.tree.map_params(
            made, lambda _, own: own, shapes, layout, transform_non_params=lambda _: everywhere
        )
        params = jax.jit(lambda: PARAMS, out_shardings=layout)()
        return params, jax.jit(made.init, out_shardings=layouts)(params), (layout, layouts)

    if how == "resume":
        others = jax.tree.map(np.ones_like, PARAMS)  # not those that the run began with
        tell(folder / "fit", rank, fit(others, sharding=rows, checkpoints=folder / "fit", evaluate=evaluate(rank)))
        return
    if how == "by hand":
        train_by_hand(rank, rows, everywhere, folder, begin)
        zeros = jax.jit(lambda: jnp.zeros(4), out_shardings=everywhere)()
        np.save(folder / f"cut-{rank}", train_on_cut_batches(zeros, sharding=rows))
        tell(folder / "banded", rank, fit(made=banded(), key=dpx.secret_key(7), sharding=rows))
        return
    params, state, layouts = begin()
    check_loading(rank, rows, state)
    check_one_key(rank, rows, state)
    write(folder / "whole", rank, made, *train(step_function(layouts), params, state, sharding=rows))
    measure_privately(begin(WIDE)[0], rows)
    check_refusals(rank, rows, folder)
    interrupted_fit(rank, rows, folder)


def measure_privately(wide, sharding):
    """No process has all of the parameters, nor all values of the metric; both release the same number."""
    outputs = jax.jit(lambda params: jnp.tanh(DATA["x"] @ params["w1"]).mean(1) > 0, out_shardings=sharding)
    metric = dpx.statistics.PrivateMetric(outputs, noise_multiplier=9.0, key=dpx.secret_key(8))
    measured = fit(wide, sharding=sharding, steps=2, evaluate_private=metric)
    values = multihost_utils.process_allgather(np.array([each.value for each in metric.released], np.float32))
    assert values.shape == (2, 1) and values[0] == values[1] == np.float32(measured.history[0]["private_metric"])
    assert not measured.params["w1"].is_fully_replicated and not outputs(wide).is_fully_addressable


def train_by_hand(rank, rows, everywhere, folder, begin):
    """Sharded parameters; and a loop with checkpoints of its own, which is interrupted and continued."""
    import orbax.checkpoint as ocp

    made = optimizer()[1]
    with ocp.CheckpointManager(folder / "checkpoints") as manager:

        def interrupted(steps, params, state):
            if steps % 2 == 0:
                manager.save(steps, args=ocp.args.StandardSave((params, state)))
                manager.wait_until_finished()
            elif steps == 3:
                raise KeyboardInterrupt

        wide, state, layouts = begin(WIDE)
        trained, state = train(step_function(layouts), wide, state, sharding=rows)
        assert trained["w1"].addressable_shards[0].data.shape == (4, 1)
        write(folder / "wide", rank, made, jax.jit(lambda tree: tree, out_shardings=everywhere)(trained), state)
        params, state, layouts = begin()
        step = step_function(layouts)
        with contextlib.suppress(KeyboardInterrupt):
            train(step, params, state, sharding=rows, after_step=interrupted)
        assert manager.latest_step() == 2
        params, state = manager.restore(2, args=ocp.args.StandardRestore((params, state)))
        assert dpx.accounting.steps_taken(state) == 2
        write(folder / "resumed", rank, made, *train(step, params, state, sharding=rows))


@mock.patch("dpx.sampling.data.FIRST", 0)  # no item is read again
def check_loading(rank, sharding, state):
    """A process reads the rows of its own devices alone; together the processes hold the batch of one process."""
    key = optimizer()[0]
    for options in ({}, {"chunk_size": 7}):
        source = Source()
        batches = SAMPLING.batches(source, key, state, steps=1, sharding=sharding, prefetch=0, **options)
        batch = next(batches)
        indices, included = SAMPLING.draw(key, 0)
        pieces = [batch]
        if options:  # chunks of eight rows, which is the next multiple of the devices
            pieces, rows_drawn = list(batch), -(-included.sum() // 8) * 8
            indices, included = indices[:rows_drawn], included[:rows_drawn]
        assert len(pieces) == (len(included) // 8 if options else 1)
        first, *compared = [source.read.pop(0) for _ in range(9)]  # to see what an example looks like
        assert first == 0 and compared == [*range(0, 64, 9)]
        wanted = []
        for number, piece in enumerate(pieces):
            size = len(piece.included)
            half = slice(number * size + rank * size // 2, number * size + (rank + 1) * size // 2)
            wanted += sorted(set(indices[half].tolist()))
            examples = DATA["x"][indices] * included[:, None]  # zeros as padding
            for leaf, rows in ((piece.included, included), (piece.examples["x"], examples)):
                own = np.concatenate([np.asarray(shard.data) for shard in leaf.addressable_shards])
                np.testing.assert_array_equal(own, rows[half])
            drawn = [int(number) for number in piece.drawn]
            assert drawn[:4] == [0, included.sum(), int(dpx.keys.mark_of_key(key)), number * size]
        assert source.read == wanted and len(wanted) < included.sum()


def check_one_key(rank, sharding, state):
    """A key of its own in each process would be noise and batches of its own, which no bill covers. With a sampling or
    an order of its own, one example would be in the rows of both. Row 0 and the number of users are equal."""
    moved = np.r_[0, np.roll(np.arange(1, 64), rank)]
    users = dpx.UserData(DATA, [f"{name + 2 * rank * (name > 0):03}" for name in np.arange(64) // 2])
    weighted = dpx.PoissonSampling(examples=64, batch_size=16, weights=np.roll(np.arange(1.0, 65.0), rank))
    of_users = dpx.PoissonSampling(examples=32, batch_size=16)
    for differs, sampling, data, key in (
        ("key [", SAMPLING, DATA, dpx.secret_key(rank)),
        ("sampling [", weighted, DATA, dpx.secret_key(7)),
        ("data [", SAMPLING, jax.tree.map(lambda rows: rows[moved], DATA), dpx.secret_key(7)),
        ("data [", of_users, users, dpx.secret_key(7)),
    ):
        own = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=sampling, key=key).init(np.zeros(4, np.float32))
        try:
            sampling.batches(data, key, state if sampling is SAMPLING else own, steps=1, sharding=sharding)
        except ValueError as error:
            assert "every process must have the same key" in str(error) and f"processes: {differs}" in str(error), error
        else:
            raise AssertionError(f"passed: {differs}")


def evaluate(rank):
    """Metrics that differ between the processes."""
    return lambda params: {"output": float(params["b2"]), "process": rank}


def interrupted_fit(rank, sharding, folder):
    """`fit` is ended by a callback of one process, continued, and ended by the death of a process.

    The first checkpoint is older than the first draw.
    """
    begun, draw = [], dpx.PoissonSampling.draw

    def spied(self, key, step, **options):
        begun.append((folder / "fit" / "0").is_dir())
        return draw(self, key, step, **options)

    def watch(progress):
        losses, included = np.asarray(progress.unreleased.losses), np.asarray(progress.unreleased_included)
        np.testing.assert_allclose(losses[included].mean(), progress.unreleased_loss, rtol=1e-5)
        return rank == 1 and progress.step == 2

    def die(progress):
        if rank == 1 and progress.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    options = {"evaluate": evaluate(rank), "sharding": sharding, "checkpoints": folder / "fit", "progress": True}
    with mock.patch.object(dpx.PoissonSampling, "draw", spied):
        assert fit(callbacks=[watch], **options).steps == 2
    assert len(begun) >= 2 and all(begun)
    fit(callbacks=[die], checkpoint_every=3, **options)


def check_refusals(rank, sharding, folder):
    """Where the processes differ, every process says so and none waits for the other."""
    key, made = optimizer()
    short = jax.tree.map(lambda rows: rows[: 64 - 14 * rank], DATA)
    params = jax.tree.map(lambda leaf: leaf + np.float32(rank), PARAMS)
    bad_folder = folder / "none" / str(rank)

    released = dpx.dp_sgd(clip_norm=1.0, noise_multiplier=1.0, sampling=SAMPLING, key=key)
    other = dpx.chain(released, optax.sgd(0.25))
    frozen = dpx.in_coordinates(released, dpx.coordinates.random_freeze(freeze_rate=0.5, every=1, key=key))
    projected = dpx.in_coordinates(frozen, dpx.coordinates.random_projection(rank=20, kind="countsketch", key=key))
    explicit = {
        "made": dpx.chain(projected, optax.sgd(0.5)),
        "sharding": NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data")),
        "checkpoints": folder / "one",
    }

    def fails(params):
        assert rank == 0, "no file"
        return 0.0

    cases = {
        "key of the noise (its mark) is": {"made": optimizer(rank)[1], "key": key},
        "key of the batches (its mark) is": {"key": dpx.secret_key(rank)},
        "fingerprint) is": {"made": other if rank else made},
        "data must hold the 64 examples of the sampling, got 50": {"data": short},
        "some examples of the data (their mark) is": {"data": DATA | {"y": np.r_[DATA["y"][:-1], np.float32(rank)]}},
        "params (their fingerprint) is": {"params": params},
        "steps is 4 in process 0, 5": {"steps": 4 + rank},
        "evaluate_every is 2 in process 0, 3": {"evaluate_every": 2 + rank},
        f"checkpoints is {folder}": {"checkpoints": bad_folder},
        "sharding must have devices of all 2 processes, because they make one run; got None": {"sharding": None},
        "no file": {"evaluate": fails, "evaluate_every": 1},  # in process 1, after the first step
        "differ: steps [None, 3]": explicit,
    }
    patched = mock.patch.object(Folder, "_checkpoint_steps", lambda self: [3] if rank else [])
    for words, options in cases.items():
        with patched if "differ: steps" in words else contextlib.nullcontext():
            try:
                fit(**{"sharding": sharding} | options)
            except (ValueError, AssertionError) as error:
                assert words in str(error), (words, str(error))
            else:
                raise AssertionError(f"passed: {words}")
    assert not bad_folder.exists()


def tell(path: Path, rank: int, result: dpx.fitting.FitResult):
    """Every process says what it knows of a result."""
    numbers = [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves((result.params, result.state))]
    known = {"numbers": numbers, "steps": result.steps, "epsilon": result.epsilon, "report": result.report.to_json()}
    Path(f"{path}-{rank}").write_text(json.dumps(known | {"history": result.history}))
    if rank == 0:
        np.savez(path, **{name: np.asarray(leaf) for name, leaf in result.params.items()})


def write(path: Path, rank: int, made: dpx.Mechanism, params, state):
    if rank == 0:
        arrays = {name: np.asarray(leaf) for name, leaf in params.items()}
        np.savez(path, **arrays, epsilon=dpx.epsilon(made, state, delta=1e-5), steps=dpx.accounting.steps_taken(state))
