"""Every sampling on every path: whole, in chunks, inside a scan, by `fit`, on one device and on eight: the same bits.

The gradients are multiples of 1/64 that no clip changes, so every order of a sum has the same result. Then the releases
must be the same integers on the grid. Every divisor is a power of two, so the parameters have the same bits too, also
where XLA joins the division and the subtraction after a release, and rounds once instead of twice.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dpx
from tests.devices import on_eight_devices
from tests.problems import dp_sgd, poisson

STEPS = 6
SAMPLINGS = {
    "poisson": poisson(64, 8),
    "truncated": poisson(64, 8, most_rows=8),
    "weighted": poisson(64, 8, weights=1.0 + np.arange(64) % 4),
    "allocated": dpx.sampling.RandomAllocation(examples=64, steps_per_epoch=4),
    "cyclic": dpx.sampling.CyclicPoissonSampling(examples=64, batch_size=8, bands=2),
    "ordered": dpx.sampling.FixedOrder(examples=64, batch_size=16),
}
DATA = np.random.default_rng(0).integers(-9, 10, size=(64, 5)).astype(np.float32) / 64
PARAMS = {"w": np.zeros(5, np.float32)}


def key():
    return dpx.secret_key(2**100 + 3)


def loss(params, example):
    return example @ params["w"]


def optimizer(sampling):
    return dpx.chain(dp_sgd(sampling, key=key()), optax.sgd(1.0))


def told(made, params, state):
    """What a run has at its end: its parameters, and its bill."""
    return [*np.asarray(params["w"]).tolist(), dpx.epsilon(made, state, delta=1e-5)]


def whole(sampling, **options):
    made = optimizer(sampling)
    step, params, state = jax.jit(dpx.private_updates(loss, made)), PARAMS, made.init(PARAMS)
    for batch in sampling.batches(DATA, key(), state, steps=STEPS, **options):
        updates, state, _ = step(params, batch, state)
        params = optax.apply_updates(params, updates)
    return told(made, params, state)


def chunked(sampling, **options):
    made = optimizer(sampling)
    step, params, state = dpx.private_updates_in_chunks(loss, made), PARAMS, made.init(PARAMS)
    add, release = jax.jit(step.add), jax.jit(step.release)
    for chunks in sampling.batches(DATA, key(), state, steps=STEPS, chunk_size=4, **options):
        sums = None
        for chunk in chunks:
            sums = add(params, chunk, state, sums)
        updates, state = release(params, sums, state)
        params = optax.apply_updates(params, updates)
    return told(made, params, state)


def scanned(sampling):
    made = optimizer(sampling)
    gradient, data = dpx.private_updates(loss, made), jnp.asarray(DATA)

    def body(carry, row):
        params, state = carry
        updates, state, _ = gradient(params, row.batch(data), state)
        return (optax.apply_updates(params, updates), state), None

    begin = jax.tree.map(jnp.asarray, PARAMS), made.init(PARAMS)
    rows = sampling.draw_ahead(key(), begin[1], STEPS)
    (params, state), _ = jax.jit(functools.partial(jax.lax.scan, body))(begin, rows)
    return told(made, params, state)


def fitted(sampling):
    made = optimizer(sampling)
    found = dpx.fit(loss, made, PARAMS, DATA, key=key(), steps=STEPS, delta=1e-5, progress=False)
    assert found.epsilon == dpx.epsilon(made, found.state, delta=1e-5)
    return told(made, found.params, found.state)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.long_cases("poisson", "cyclic", "weighted", "allocated", "ordered")
def test_every_path_has_the_same_bits(name):
    expected = whole(SAMPLINGS[name])
    assert expected[-1] == pytest.approx(dpx.epsilon(optimizer(SAMPLINGS[name]), STEPS, delta=1e-5), rel=1e-4)
    for path in (chunked, scanned, fitted):
        assert path(SAMPLINGS[name]) == expected, path


def test_batches_are_cut_and_exceed_a_chunk_here():
    """So the tests of this file are of batches that are cut, in several chunks."""
    free = [SAMPLINGS["poisson"].draw(key(), step).included.sum() for step in range(STEPS)]
    cut = [SAMPLINGS["truncated"].draw(key(), step).included.sum() for step in range(STEPS)]
    assert cut == [min(8, count) for count in free] and sum(count > 8 for count in free) >= 2


def print_on_eight_devices(name):
    assert len(jax.devices()) == 8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding, sampling = NamedSharding(mesh, PartitionSpec("data")), SAMPLINGS[name]
    print(*whole(sampling), *whole(sampling, sharding=sharding), *chunked(sampling, sharding=sharding))


@pytest.mark.parametrize("name", ["truncated", "allocated"])  # all samplings load their batches in one way
@pytest.mark.long_cases("allocated")
def test_eight_devices_have_the_bits_of_one(name):
    printed = on_eight_devices(f"from tests import test_sampling_paths as t; t.print_on_eight_devices({name!r})")
    assert printed.split() == 3 * list(map(repr, whole(SAMPLINGS[name])))


def test_runs_of_other_weights_on_one_key_have_one_noise_and_no_bill_together():
    """The noise is a function of the key and the step, so the difference of two releases has none."""
    other = poisson(64, 8, weights=1.0 + np.arange(64) % 3)
    mechanisms = [dp_sgd(sampling, key=key()) for sampling in (SAMPLINGS["weighted"], other)]
    sums = ({"w": jnp.zeros(5)},)
    first, second = (
        np.asarray(made.release(sums, made.init(PARAMS), PARAMS)[0]["w"]) * made.sampling.divisor for made in mechanisms
    )
    np.testing.assert_allclose(first, second, rtol=1e-6)
    with pytest.raises(ValueError, match="every run must have a key of its own"):
        dpx.compose_runs(*((made, 3) for made in mechanisms), shared_batches=False)
    state = mechanisms[0].init(PARAMS)
    with pytest.raises(ValueError, match="counts another sampling than"):
        other.take(DATA, key(), state)
    with pytest.raises(ValueError):
        dpx.epsilon(mechanisms[1], state, delta=1e-5)
