"""Random projections: unbiased, no longer than stated, drawn once for a batch; and the algorithms of D2P2-SGD."""

import functools
import math
import threading

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from jax.flatten_util import ravel_pytree

import dpx
from dpx import keys
from dpx.papers.d2p2_sgd.cost import event_with_projection
from dpx.papers.d2p2_sgd.projections import (
    SKETCHES,
    UNROLLED,
    hadamard_transform,
    projection_coordinates,
    random_signs,
)
from dpx.sums.rounding import ETA
from tests.mechanisms import PARAMS, POISSON
from tests.test_dp_sgd import loss, model

KEY = jax.random.key(5)
NAMES = tuple(SKETCHES)
BOUNDED = tuple(name for name, sketch in SKETCHES.items() if sketch.stretch)


def cut(vector, sizes):
    return jnp.split(vector, np.cumsum(sizes)[:-1])


@functools.cache
def matrices(name, sizes, rank):
    """keys -> the matrices P of the kind, (keys, coordinates, d)."""
    project = SKETCHES[name].project

    def matrix(key):
        return jax.vmap(lambda v: jnp.concatenate(project(key, cut(v, sizes), rank)), out_axes=1)(jnp.eye(sum(sizes)))

    return jax.jit(jax.vmap(matrix))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.long_cases("hadamard", "subset")
def test_the_lift_is_unbiased(name):
    """E[lift(project(v))] = v for every coordinate vector, within 5 standard errors; false alarm below 1e-3 in all."""
    sketch, sizes, draws = SKETCHES[name], (7, 3), 3000

    def there_and_back(key):
        def one(v):
            return jnp.concatenate(sketch.lift(key, sketch.project(key, cut(v, sizes), 6), sizes, 6))

        return jax.vmap(one)(jnp.eye(10))

    found = np.asarray(jax.jit(jax.vmap(there_and_back))(jax.random.split(KEY, draws)), np.float64)
    np.testing.assert_allclose(found, found.transpose(0, 2, 1), atol=1e-5)  # P^T P
    tolerance = 5 * found.std(0) / math.sqrt(draws) + 1e-6
    np.testing.assert_array_less(np.abs(found.mean(0) - np.eye(10)), tolerance)
    assert (np.abs(0.9 * found.mean(0) - np.eye(10)) > tolerance).any()


@pytest.mark.parametrize("name", BOUNDED)
def test_no_vector_is_stretched_more_than_stated(name):
    """The worst vector is the first singular vector."""
    for sizes, rank in (((100, 29, 1), 70), ((33, 30), 1)):
        p = np.asarray(matrices(name, sizes, rank)(jax.random.split(KEY, 5)), np.float64)
        worst = np.linalg.svd(p, compute_uv=False)[:, 0].max()
        stated = SKETCHES[name].stretch(sizes, rank)
        assert worst <= stated * (1 + 3e-6)
        assert worst >= 0.7 * stated


def test_an_orthonormal_projection_is_an_isometry_on_its_range():
    """In each of its blocks: here two of 64 coordinates, with 34 and 33 columns."""
    singular = np.linalg.svd(matrices("orthonormal", (128,), 67)(KEY[None])[0], compute_uv=False)
    expected = [math.sqrt(64 / 33)] * 33 + [math.sqrt(64 / 34)] * 34 + [0.0]
    np.testing.assert_allclose(singular, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BOUNDED)
@pytest.mark.long_cases("countsketch", "hadamard", "subset")
def test_a_clipped_sum_is_not_lengthened(name):
    """As clip-then-project writes it, layer by layer, for the worst vector; the lift makes up for it."""
    rank = {"kernel": 5, "bias": 1, "scale": 1}
    coordinates = projection_coordinates(rank, None, name, 1, keys.stream(KEY, "test"), bounded=True)
    _, unravel = ravel_pytree(PARAMS)

    unbounded = projection_coordinates(rank, None, name, 1, keys.stream(KEY, "test"), bounded=False)

    @jax.jit
    def plain(state):
        """P^T P without the scale."""
        encoded = jax.vmap(lambda v: unbounded.encode(unravel(v), state))(jnp.eye(16))
        return jax.vmap(lambda z: ravel_pytree(unbounded.decode(z, state, PARAMS)[0])[0])(encoded)

    @jax.jit
    def both(state):
        encoded = jax.vmap(lambda v: coordinates.encode(unravel(v), state))(jnp.eye(16))
        lifted = jax.vmap(lambda z: ravel_pytree(coordinates.decode(z, state, PARAMS)[0])[0])(encoded)
        return jax.vmap(lambda z: ravel_pytree(z)[0])(encoded), lifted

    for step in range(3):
        encoded, lifted = both(coordinates.init(PARAMS)._replace(step=jnp.int32(step)))
        assert np.linalg.svd(np.asarray(encoded, np.float64), compute_uv=False)[0] <= 1
        np.testing.assert_allclose(lifted, plain(coordinates.init(PARAMS)._replace(step=jnp.int32(step))), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_shares_one_draw(name):
    """Nothing random is drawn for an example: the same jaxpr draws the same number of bits at any batch size."""
    coordinates = dpx.coordinates.random_projection(rank=12, kind=name, key=KEY)

    def bits(examples):
        batch = jax.tree.map(lambda p: jnp.zeros((examples, *p.shape)), PARAMS)
        traced = jax.make_jaxpr(jax.vmap(coordinates.encode, (0, None)))(batch, coordinates.init(PARAMS))
        return drawn(traced.jaxpr)

    assert bits(2) == bits(5) > 0


def drawn(jaxpr) -> int:
    """How many random numbers the equations draw, those of a loop once."""
    found = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "random_bits":
            found += sum(v.aval.size for v in equation.outvars)
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            found += drawn(inner) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.parametrize("name", ["gaussian", "orthonormal"])
@pytest.mark.long
def test_dense_matrices_are_streamed(name):
    """At d = 550,000 and p = 0.7 d, where A has 2e11 numbers, a program's own memory is that of a few blocks."""
    size, rank, examples = 550_000, 385_000, 2
    like = jax.ShapeDtypeStruct((examples, size), jnp.float32)
    sketch = SKETCHES[name]
    project = jax.jit(jax.vmap(lambda v: sketch.project(KEY, [v], rank)[0])).lower(like)
    coordinates = project.out_info
    lift = jax.jit(lambda z: sketch.lift(KEY, [z], [size], rank)[0]).lower(
        jax.ShapeDtypeStruct(coordinates.shape[1:], jnp.float32)
    )
    for program in (project, lift):
        assert program.compile().memory_analysis().temp_size_in_bytes < 200e6


def test_a_draw_is_a_function_of_the_step():
    vector = {"w": jnp.arange(1.0, 41.0)}

    def encoded(every, step):
        coordinates = dpx.coordinates.random_projection(rank=20, kind="countsketch", every=every, key=KEY)
        return np.asarray(coordinates.encode(vector, coordinates.init(vector)._replace(step=jnp.int32(step)))[0])

    assert (encoded(1, 0) != encoded(1, 1)).any() and (encoded(1, 3) == encoded(1, 3)).all()
    assert (encoded(3, 0) == encoded(3, 2)).all() and (encoded(3, 2) != encoded(3, 3)).any()
    assert (encoded(None, 0) == encoded(None, 1000)).all()


def test_projections_and_noise_have_streams_of_their_own(monkeypatch):
    stream, named = keys.stream, []
    monkeypatch.setattr(keys, "stream", lambda key, name, *step: named.append(name) or stream(key, name, *step))
    dpx.coordinates.random_projection(rank=3, kind="subset", key=KEY)
    dpx.mechanisms.clip_then_project(base(), rank=3, kind="subset")
    assert [name for name in named if name != "mark"] == ["projection", "noise", "projection of the sum"]


def base(**changes):
    given = {"clip_norm": 1.5, "noise_multiplier": 1.0, "sampling": POISSON, "key": KEY}
    return dpx.dp_sgd(**(given | changes))


@pytest.mark.long
def test_the_noise_is_white_where_it_is_added():
    """Given P, release(0) has covariance (sigma C)^2 P^T P: within 6 standard errors, and not 4/9 of it."""
    coordinates = dpx.coordinates.random_projection(rank=12, kind="gaussian", every=None, key=jax.random.key(1))
    state = dpx.in_coordinates(base(), coordinates).init(PARAMS)
    zeros = ([jnp.zeros(12)],)

    def draw(key):
        mechanism = dpx.in_coordinates(base(key=key), coordinates)
        return ravel_pytree(mechanism.release(zeros, state, PARAMS)[0])[0] * POISSON.divisor

    noise = np.asarray(jax.jit(jax.vmap(draw))(jax.random.split(KEY, 4000)), np.float64)
    _, unravel = ravel_pytree(PARAMS)
    p = np.asarray(jax.vmap(lambda v: coordinates.encode(unravel(v), state.coordinates[0])[0])(jnp.eye(16))).T
    added = noise @ np.linalg.pinv(p) / 1.5  # of full rank: the noise in the coordinates
    np.testing.assert_allclose(added @ p * 1.5, noise, atol=1e-3)
    covariance = added.T @ added / len(added)
    tolerance = 6 * np.sqrt((1 + np.eye(12)) / len(added))
    np.testing.assert_array_less(np.abs(covariance - np.eye(12)), tolerance)
    assert (np.abs(4 / 9 * covariance - np.eye(12)) > tolerance).any()


def test_hadamard_transform():
    for order in range(8):
        rows = np.random.default_rng(order).normal(size=(3, 2**order))
        expected = rows @ scipy.linalg.hadamard(2**order)
        np.testing.assert_allclose(hadamard_transform(jnp.asarray(rows, jnp.float32)), expected, atol=1e-4)


@pytest.mark.parametrize("rank", [40, 3])
def test_count_sketch_is_its_formula(rank):
    """Unrolled (3 runs) and looped (34): column i has one sign, in bucket (i + r_k) mod p with the r_k of its run."""
    p = np.asarray(matrices("countsketch", (60, 41), rank)(KEY[None]))[0]
    assert (np.count_nonzero(p, axis=0) == 1).all() and set(np.abs(p).ravel()) == {0.0, 1.0}
    assert not p[rank:].any()
    assert 20 < (p.sum(0) > 0).sum() < 80
    offsets = (np.abs(p).argmax(0) - np.arange(101)) % rank
    for run in range(0, 101, rank):
        assert len(set(offsets[run : run + rank])) == 1
    assert len(set(offsets)) > 1 and UNROLLED == 16


def test_a_subset_has_exactly_so_many():
    p = np.asarray(matrices("subset", (50, 27), 31)(jax.random.split(KEY, 20)))
    assert (np.count_nonzero(p, axis=(1, 2)) == 31).all()
    assert p.shape == (20, 77, 77) and not p[:, ~np.eye(77, dtype=bool)].any()


def test_frozen_layers_are_not_projected():
    frozen = dpx.coordinates.trainable(mask={"kernel": True, "bias": False, "scale": True})
    mechanism = dpx.in_coordinates(
        base(), frozen, dpx.coordinates.random_projection(rank=9, kind="orthonormal", key=KEY)
    )
    grads = jax.tree.map(lambda p: jnp.ones((3, *p.shape)), PARAMS)
    updates, _ = jax.jit(mechanism.update)(grads, mechanism.init(PARAMS), PARAMS, included=jnp.ones(3, bool))
    assert not updates["bias"].any() and updates["kernel"].any()


# The paper's Algorithms 1 (D2P2-SGD), 2 (D2P-SGD) and 3 (DP2-SGD)


def numpy_d2p2_sgd(params, batch, *, draws, sigmas, rank, stability, learning_rate, divisor, project_first=False):
    """x <- x - a A_k (A_k^T g_k / sqrt(p) + e_k), in float64, the gradients of `loss` by hand.

    draws: (A_k, standard normals) for each step, A_k None for Algorithm 2. project_first: dpx's order, not the paper's.
    """
    w, b = np.asarray(params["w"], np.float64), np.asarray(params["b"], np.float64)
    for (a, normals), sigma in zip(draws, sigmas, strict=True):
        total = 0.0
        for x, y in zip(np.asarray(batch["x"], np.float64), np.asarray(batch["y"], np.float64), strict=True):
            residual = 2 * (x @ w + b - y)
            gradient = np.concatenate([residual, np.outer(x, residual).ravel()])  # in the order of the tree: b, w
            if project_first:
                gradient = a.T @ gradient / math.sqrt(rank)
            total += gradient / (np.linalg.norm(gradient) + stability)
        noise = sigma * normals / divisor
        if a is None:
            update = total / divisor + noise
        else:
            sketch = total / divisor if project_first else a.T @ (total / divisor) / math.sqrt(rank)
            update = a @ (sketch + noise)
        b, w = b - learning_rate * update[:3], w - learning_rate * update[3:].reshape(5, 3)
    return {"w": w, "b": b}


METHODS = {
    "Algorithm 1": (dpx.methods.d2p2_sgd, {"kind": "gaussian", "order": "clip_then_project", "power": 0.5}),
    "Algorithm 1, projected first": (dpx.methods.d2p2_sgd, {"kind": "gaussian", "power": 0.5}),
    "Algorithm 2": (dpx.methods.d2p_sgd, {"power": 0.5}),
    "Algorithm 3": (dpx.methods.dp2_sgd, {"kind": "gaussian", "order": "clip_then_project"}),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.long_cases("Algorithm 1, projected")
def test_equals_the_pseudo_code(name, ungridded):
    """With the very noise that the mechanism draws."""
    method, options = METHODS[name]
    rank, steps, stability, learning_rate, noise_multiplier = 11, 3, 0.05, 0.3, 0.8
    options = options | ({"rank": rank} if "kind" in options else {})
    sampling = dpx.PoissonSampling(examples=500, batch_size=20)
    mechanism = method(noise_multiplier=noise_multiplier, stability=stability, sampling=sampling, key=KEY, **options)
    params, batch = model()
    draws = []
    for step in range(steps):
        noise_key = keys.stream(KEY, "noise")
        if "kind" not in options:
            normals = ravel_pytree(keys.normals_of_release(noise_key, step, params))[0]
            draws.append((None, (1 + ETA) * np.asarray(normals, np.float64)))
            continue
        stream = keys.stream(KEY, "projection of the sum" if "order" in options else "projection")
        draw = jax.random.fold_in(keys.public_key(keys.fold_in(stream, step)), 0)
        p = np.asarray(matrices("gaussian", (18,), rank)(draw[None]), np.float64)[0]
        normals = keys.normals_of_release(noise_key, step, [jnp.zeros(rank)])[0]
        draws.append((math.sqrt(rank) * p.T, (1 + ETA) * np.asarray(normals, np.float64)))
    falling = "power" in options
    scale = math.sqrt(rank) if "kind" in options else 1.0
    expected = numpy_d2p2_sgd(
        params,
        batch,
        draws=draws,
        sigmas=[noise_multiplier * (k**-0.5 if falling else 1) for k in (1, 2, 3)],
        rank=rank,
        stability=stability,
        learning_rate=learning_rate / scale,
        divisor=20,
        project_first="order" not in options and "kind" in options,
    )
    state = mechanism.init(params)
    gradient = jax.jit(dpx.private_updates(loss, mechanism, norms="vmap"))
    for _ in range(steps):
        updates, state, _ = gradient(params, dpx.Batch(batch, None), state)
        params = jax.tree.map(lambda p, u: p - learning_rate * u, params, updates)
    for part in params:
        np.testing.assert_allclose(params[part], expected[part], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_calibrated_by_what_may_be_spent():
    options = {"rank": 5000, "kind": "gaussian", "every": 10, "sampling": POISSON, "key": KEY}
    budget = dpx.Budget(epsilon=2.0, delta=1e-5, steps=20)
    mechanism = dpx.methods.d2p2_sgd(order="clip_then_project", noise_multiplier=budget, **options)
    assert 1.99 <= dpx.epsilon(mechanism, 20, delta=1e-5) <= 2.0
    with pytest.raises(ValueError, match="because power and every say how it falls"):
        dpx.methods.d2p2_sgd(noise_multiplier=lambda step: 2.0, **options)
    sound = dpx.methods.d2p2_sgd(noise_multiplier=2.0, **options)
    assert sound.event(20) == dpx.methods.d2p_sgd(noise_multiplier=2.0, every=10, sampling=POISSON, key=KEY).event(20)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": {}}, "at least one number"),
        ({"rank": None}, "pass either rank or reduction_rate"),
        ({"reduction_rate": 0.3}, "pass either rank or reduction_rate"),
    ],
)
def test_bad_configuration(changes, message):
    given = {"rank": 5, "kind": "subset"} | changes
    with pytest.raises(ValueError, match=message):
        dpx.coordinates.random_projection(**given, key=KEY)
    with pytest.raises(ValueError, match=message):
        dpx.mechanisms.clip_then_project(base(), **given)


def test_ranks_above_the_number_of_coordinates_are_refused():
    for rank in (17, {"kernel": 12, "bias": 4, "scale": 1}):
        with pytest.raises(ValueError, match="at most the number of coordinates"):
            dpx.in_coordinates(base(), dpx.coordinates.random_projection(rank=rank, kind="gaussian", key=KEY)).init(
                PARAMS
            )


@pytest.mark.parametrize("every", [None, 2])
def test_a_reused_gaussian_after_the_clip_is_refused(every):
    with pytest.raises(ValueError, match="fresh Gaussian projection at every step"):
        dpx.mechanisms.clip_then_project(base(), rank=5, kind="gaussian", every=every)
    assert dpx.mechanisms.clip_then_project(base(), rank=5, kind="orthonormal", every=every).event(3) == base().event(3)


def test_two_runs_never_share_their_gaussian_projections():
    """The cost is that of a projection that the gradients do not know, and a run may know those of an earlier one."""
    state, grads = None, jax.tree.map(lambda leaf: jnp.ones((8, *leaf.shape)), PARAMS)
    lifted = []
    for seed in (1, 2):
        inner = base(key=dpx.secret_key(2**100 + seed), noise_multiplier=0.0)
        made = dpx.mechanisms.clip_then_project(inner, rank=5, kind="gaussian")
        state = made.init(PARAMS)
        lifted.append(ravel_pytree(made.update(grads, state, PARAMS, included=jnp.ones(8, bool))[0])[0])
    assert float(jnp.linalg.norm(lifted[0] - lifted[1])) > 0.1 * float(jnp.linalg.norm(lifted[0]))


def feedback():
    return dpx.methods.dice_sgd(
        clip_norm=1.0, feedback_norm=0.1, outer_clip_norm=1.5, noise_multiplier=1.0, sampling=POISSON, key=KEY
    )


def test_groups_that_are_projected_apart_are_billed_by_the_smallest_rank():
    ranks = {"kernel": 8, "bias": 2, "scale": 1}
    made = dpx.mechanisms.clip_then_project(base(), rank=ranks, kind="gaussian")
    assert made.event(3) == event_with_projection(base().event(3), rank=1, blocks=3)


def test_other_unbilled_compositions_are_refused():
    with pytest.raises(ValueError, match="pass rank"):
        dpx.mechanisms.clip_then_project(base(), reduction_rate=0.3, kind="gaussian")
    fixed = base(sampling=dpx.FixedSizeSampling(examples=100, batch_size=8))
    with pytest.raises(ValueError, match="has a known cost before"):
        dpx.mechanisms.clip_then_project(fixed, rank=5, kind="gaussian").event(1)
    twice = dpx.mechanisms.clip_then_project(base(), rank=10, kind="gaussian")
    with pytest.raises(ValueError, match="has a known cost before"):
        event_with_projection(dp_accounting.ComposedDpEvent([base().event(2), feedback().event(2)]), rank=5)
    for kind in ("gaussian", "subset"):
        for inner in (feedback(), twice):  # a projection of the same stream would depend on that of `twice`
            with pytest.raises(ValueError, match="one clipped sum"):
                dpx.mechanisms.clip_then_project(inner, rank=5, kind=kind)
    outer = dpx.in_coordinates(base(), dpx.coordinates.random_projection(rank=12, kind="gaussian", key=KEY))
    with pytest.raises(ValueError, match="innermost"):
        dpx.mechanisms.clip_then_project(outer, rank=5, kind="subset").init(PARAMS)


def test_a_draw_leaves_the_settings_of_other_threads(monkeypatch):
    own, before = threading.current_thread(), jax.config.jax_enable_x64
    inside, left = threading.Event(), threading.Event()

    def signs(key, shape, dtype):
        if threading.current_thread() is own:
            other.start()
            inside.wait(10)
        else:
            inside.set()
            left.wait(10)
        return jnp.ones(shape, dtype)

    monkeypatch.setattr(jax.random, "rademacher", signs)
    other = threading.Thread(target=jax.enable_x64(True)(lambda: random_signs(KEY, 3)))
    random_signs(KEY, 3)
    found = jax.config.jax_enable_x64
    left.set()
    other.join()
    assert found == before
