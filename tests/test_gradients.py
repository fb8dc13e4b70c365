"""private_updates and private_updates_from: jit, scan, donation and sharding; half precision; bad shapes."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpx
from dpx.sums.clipped_sum import sum_over_microbatches
from dpx.xla import rows_apart
from dpx.xla.place import tracing_for_place
from tests.devices import on_eight_devices
from tests.problems import on_a_cpu
from tests.test_dp_sgd import dp_sgd, loss, model


def convolving(loss):
    """The same loss, with a convolution."""

    def same(params, example):
        one = jnp.ones((1, 1, 1))
        return loss(params, example) * jax.lax.conv_general_dilated(one, one, (1,), "VALID")[0, 0, 0]

    return same


def hiding(loss):
    """The same loss, with a convolution that a loop on a CPU would make slow, so that microbatches are unrolled."""
    return jax.checkpoint(convolving(loss))


@functools.cache
def whole_without_the_fifth(loss):
    """The step on all examples at once but one, which is left out by hand."""
    params, batch = model()
    mechanism = dp_sgd(noise_multiplier=1.0)
    without = jax.tree.map(lambda rows: np.delete(rows, 5, axis=0), batch)
    gradient = jax.jit(dpx.private_updates(loss, mechanism, norms="vmap"))
    return gradient(params, dpx.Batch(without, None), mechanism.init(params))


@pytest.mark.parametrize("microbatch_size", [1, 3, 8, 16, 100])
@pytest.mark.parametrize("loss", [convolving(loss), hiding(loss)], ids=["looped", "unrolled"])
@pytest.mark.parametrize("clipping", ["vmap", "ghost"])
@pytest.mark.long_cases(
    *("ghost-looped-1", "ghost-looped-8", "ghost-unrolled-1", "ghost-unrolled-3"),
    *("ghost-unrolled-8", "vmap-looped-16", "vmap-looped-8", "vmap-unrolled-1", "vmap-unrolled-8"),
)
def test_microbatches_equal_the_whole(microbatch_size, loss, clipping):
    params, batch = model()
    mechanism = dp_sgd(noise_multiplier=1.0)
    included = jnp.ones(16, bool).at[5].set(False)
    expected = whole_without_the_fifth(loss)
    gradient = jax.jit(dpx.private_updates(loss, mechanism, microbatch_size=microbatch_size, norms=clipping))
    actual = gradient(params, dpx.Batch(batch, included), mechanism.init(params))
    chex.assert_trees_all_close((actual.updates, actual.state), expected[:2], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.delete(actual.unreleased.losses, 5), expected.unreleased.losses, rtol=1e-6)


def test_a_loop_over_microbatches_drops_what_it_begins_with():
    def function(ordered, rows):
        return {"sum": rows.sum(0)}, ordered(rows)

    rows = jnp.arange(18.0).reshape(9, 2)
    loop = jax.jit(lambda like: sum_over_microbatches(function, rows, 2, like=like))
    for begun_with in (jnp.full(2, jnp.nan), jnp.full(2, jnp.inf), jnp.ones(2), jnp.ones(3)):
        sums, outputs = loop([begun_with])
        np.testing.assert_array_equal(sums["sum"], rows.sum(0))
        np.testing.assert_array_equal(outputs, rows)


def with_dropout(params, example, key):
    """A loss in which each example drops inputs of its own, and returns which."""
    kept = jax.random.bernoulli(key, 0.5, example["x"].shape).astype(jnp.float32)
    return loss(params, example | {"x": kept * example["x"]}), {
        "kept": kept,
        "scale": 2.0,
        "key": jax.random.key_data(key),
    }


@pytest.mark.parametrize("clipping", ["vmap", "ghost"])
@pytest.mark.long_cases("ghost")
def test_keys_and_aux_of_the_examples(clipping):
    """Every row has its own key at every step, whatever the microbatch; and its own norm and aux."""
    params, batch = model()
    mechanism = dp_sgd(clip_norm=5.0)
    state, options = mechanism.init(params), {"norms": clipping, "with_key": True, "has_aux": True}
    included = jnp.ones(16, bool).at[5].set(False)
    batches = dpx.Batch(batch, included)
    steps = [
        jax.jit(dpx.private_updates(with_dropout, mechanism, microbatch_size=size, **options)) for size in (None, 3)
    ]
    whole, after, in_parts = [
        step(params, batches, start)
        for step, start in ((steps[0], state), (steps[0], state._replace(step=state.step + 1)), (steps[1], state))
    ]
    chex.assert_trees_all_close(in_parts, whole, rtol=1e-5, atol=1e-6)
    kept = np.asarray(whole.unreleased.aux["kept"])
    assert len(np.unique(np.concatenate([run.unreleased.aux["key"] for run in (whole, after)]), axis=0)) == 32
    np.testing.assert_array_equal(whole.unreleased.aux["scale"], np.full(16, 2.0))
    dropped = batch | {"x": kept * batch["x"]}

    @jax.jit
    def by_hand(params, dropped):
        losses, grads = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, dropped)
        updates, _ = mechanism.update(grads, state, params, included=included)
        return updates, jax.vmap(optax.tree.norm)(grads), losses

    expected, norms, losses = by_hand(params, dropped)
    chex.assert_trees_all_close(whole.updates, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(whole.unreleased.norms, norms, rtol=2e-3)
    np.testing.assert_allclose(whole.unreleased.losses, losses, rtol=1e-5)
    share = (np.asarray(whole.unreleased.norms) > 5)[batches.included].mean()
    assert 0 < share < 1 and share == pytest.approx(np.mean(np.delete(whole.unreleased.norms, 5) > 5))


def test_keys_of_the_examples_are_a_stream_of_their_own():
    params, batch = model()
    found = {}
    for name, key in (
        ("typed", jax.random.key(3)),
        ("other", jax.random.key(4)),
        ("rbg", jax.random.key(3, impl="rbg")),
    ):
        mechanism = dp_sgd(key=key)
        gradient = dpx.private_updates(
            lambda p, e, key: (loss(p, e), jax.random.key_data(key)), mechanism, with_key=True, has_aux=True
        )
        run = jax.jit(gradient)(params, dpx.Batch(batch, None), mechanism.init(params)).unreleased.aux
        found |= {f"{name} {row}": tuple(data) for row, data in enumerate(np.asarray(run).tolist())}
        expected = jax.random.fold_in(dpx.keys.public_key(dpx.keys.stream(key, "example", 0)), 15)
        np.testing.assert_array_equal(run[15], jax.random.key_data(expected))
    assert len(set(found.values())) == len(found) == 3 * 16


def test_dropout_and_aux_leave_the_ghosts_alone():
    """Neither random bits nor what only the aux reads makes a parameter need per-example gradients."""
    params, batch = model()

    def aux(params, example, key):
        value, kept = with_dropout(params, example, key)
        return value, (kept, optax.tree.norm(params), params["w"])

    plain = dpx.explain_norms(loss, dp_sgd(), params, dpx.Batch(batch, None), norms="ghost")
    options: Any = {"norms": "ghost", "with_key": True, "has_aux": True}
    assert dpx.explain_norms(aux, dp_sgd(), params, dpx.Batch(batch, None), **options).rows == plain.rows
    assert dict(row[:2] for row in plain.rows)["['w']"] == "norm from |input| |cotangent|"


def dense(params, x):
    return jnp.sum(jnp.tanh(x @ params["in"]) @ params["out"])


def gradients_held(loss, microbatch_size=None, size=64, mechanism=None, norms="vmap"):
    """Temporary memory of a step, in gradients of one example."""
    params = {"in": jnp.zeros((64, 256)), "out": jnp.zeros((256, 64))}
    mechanism = mechanism or dp_sgd(noise_multiplier=1.0)
    gradient = dpx.private_updates(loss, mechanism, microbatch_size=microbatch_size, norms=norms)
    batch = dpx.Batch(jnp.zeros((size, 64)), None)
    program = jax.jit(gradient).lower(params, batch, mechanism.init(params)).compile()
    return program.memory_analysis().temp_size_in_bytes / (4 * 2 * 64 * 256)


@pytest.mark.parametrize("loss", [dense, hiding(dense)], ids=["looped", "unrolled"])
@pytest.mark.long_cases("unrolled")
def test_memory_is_that_of_a_microbatch(loss):
    """Of 64 examples, 4 at once: the gradients of 64 are never there together."""
    assert gradients_held(loss, 64) > 30
    assert gradients_held(loss, 4) < 12


@on_a_cpu
@pytest.mark.parametrize("size", [64, 61])
@pytest.mark.long_cases("61")
def test_where_a_batch_would_leave_the_cache_of_a_cpu_microbatches_are_chosen(size, monkeypatch):
    assert gradients_held(dense, size=size) > 30
    monkeypatch.setattr("dpx.gradients.clipped_gradients.CACHE_BYTES", 2**19)  # 4 gradients
    monkeypatch.setattr("dpx.gradients.clipped_gradients.EXAMPLE_BYTES_PER_SUM_BYTE", 1)
    assert gradients_held(dense, size=size) < 12
    monkeypatch.setattr("dpx.gradients.clipped_gradients.CONVOLUTION_BYTES", 2**22)  # a quarter of the batch
    assert gradients_held(convolving(dense), size=size) > 30
    monkeypatch.setattr("dpx.gradients.clipped_gradients.CONVOLUTION_BYTES", 1)
    assert gradients_held(hiding(dense), size=size) > 30
    assert gradients_held(convolving(dense), size=size) < 20  # 8 at once
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert gradients_held(dense, size=size) > 30


OF_A_TPU: Any = {"platform": "tpu", "devices": 1, "memory": None}


@pytest.mark.parametrize(
    ("inside", "changes", "place", "split"),
    [
        (lambda w, x: jax.jit(jnp.sin)(x @ w), {}, {}, True),
        (lambda w, x: x @ w, {"EQUATION_BYTES": 2**20}, {}, False),  # more turns would take longer
        (lambda w, x: x @ w, {"FAST_BYTES": 2**10}, {}, False),  # one example's array is larger
        (lambda w, x: x @ w, {}, {"devices": 2}, False),
        (lambda w, x: x @ w, {}, {"platform": "gpu"}, False),
        (lambda w, x: jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, None, length=4)[0][0, 0] * w, {}, {}, False),
        (lambda w, x: x[0] * jnp.sin(jnp.tile(w, (64, 1))).sum(), {}, {}, False),  # of the parameters alone
    ],
    ids=["split", "turns", "too large", "devices", "gpu", "loop", "parameters"],
)
def test_a_tpu_takes_as_many_examples_as_its_fast_memory_holds(inside, changes, place, split, monkeypatch):
    """Arrays of 16 KiB, four at once."""
    for name, value in ({"FAST_BYTES": 2**16, "EQUATION_BYTES": 2**8} | changes).items():
        monkeypatch.setattr(f"dpx.gradients.clipped_gradients.{name}", value)
    given = dpx.dp_sgd(**BASE, key=jax.random.key(0)), {"w": jnp.ones((8, 8))}, dpx.Batch(jnp.ones((16, 512, 8)), None)
    with tracing_for_place(**OF_A_TPU | place):
        found = dpx.explain_norms(lambda params, x: jnp.sum(inside(params["w"], x)), *given).microbatches
    assert found == "microbatches of 4 examples: all 16 would not fit in the TPU's fast memory" * split


BASE = {"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": dpx.PoissonSampling(examples=1000, batch_size=64)}


def projected(kind):
    projection = dpx.coordinates.random_projection(reduction_rate=0.3, kind=kind, key=jax.random.key(0))
    return dpx.in_coordinates(dpx.dp_sgd(**BASE, key=jax.random.key(0)), projection)


@pytest.mark.parametrize(
    "mechanism",
    [
        dpx.methods.ada_dpigu(keep=0.6, warmup=1, **BASE, key=jax.random.key(0)),
        projected("countsketch"),
        projected("hadamard"),
    ],
    ids=["ada_dpigu", "countsketch", "hadamard"],
)
@pytest.mark.long
def test_what_is_encoded_is_held_in_segments(mechanism, monkeypatch):
    """Stacked, the 64 gradients and what they become would be some 100."""
    monkeypatch.setattr("dpx.sums.clipped_sum.SEGMENT_NUMBERS", 2 * 64 * 256 * 8)
    assert gradients_held(dense, 64, mechanism=mechanism) < 30


@pytest.mark.parametrize(
    "mechanism, largest",
    [
        (dpx.dp_sgd(**BASE, key=jax.random.key(0)), 11.5),
        (dpx.methods.dice_sgd(feedback_norm=1.0, outer_clip_norm=1.5, **BASE, key=jax.random.key(0)), 16),
    ],
    ids=["one factor", "two factors"],
)
@pytest.mark.long_cases("two factors")
def test_noise_and_gradients_are_not_there_together(mechanism, largest):
    """Of 512 examples by ghost norms, where the activations of a layer are 4 gradients, and the noise 2. Without the
    reductions of YNNPACK, XLA keeps a copy of these activations."""
    largest += 4 * rows_apart.is_suspected_version()
    largest = largest if jax.__version_info__ < (0, 11) else 19.5  # jaxlib 0.12 keeps more activations, with one or two
    assert gradients_held(dense, 512, size=512, mechanism=mechanism, norms="ghost") < largest


def test_scan_and_donation():
    params, batch = model()
    optimizer = dpx.chain(dp_sgd(noise_multiplier=1.0), optax.sgd(0.1, momentum=0.9))
    gradient = dpx.private_updates(loss, optimizer, microbatch_size=8)

    def step(carry, _):
        params, state = carry
        updates, state, losses = gradient(params, dpx.Batch(batch, None), state)
        return (optax.apply_updates(params, updates), state), losses

    carry = (params, optimizer.init(params))
    scanned, _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=5))(carry)
    jitted = jax.jit(lambda carry: step(carry, None)[0], donate_argnums=0)
    carry = jax.tree.map(jnp.array, carry)
    for _ in range(5):
        carry = jitted(carry)
    chex.assert_trees_all_close(carry, scanned, rtol=1e-5, atol=1e-6)
    assert dpx.accounting.steps_taken(carry[1]) == 5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.long_cases("float16")
def test_half_precision_parameters(dtype):
    """The update has the parameters' dtype, the state keeps its shape under scan; the sum is exact in float32."""
    params = {"w": jnp.zeros((2,), dtype)}
    mechanism = dpx.dp_sgd(
        clip_norm=1000.0, noise_multiplier=0.0, sampling=dpx.FullBatch(examples=1000), key=jax.random.key(0)
    )
    optimizer = dpx.chain(mechanism, optax.trace(0.5))

    def linear(params, example):
        return jnp.sum(params["w"] * example)

    batch = jnp.ones((1000, 2), dtype)
    gradient = dpx.private_updates(linear, optimizer, microbatch_size=300)
    state = optimizer.init(params)
    updates, after, _ = jax.jit(gradient)(params, dpx.Batch(batch, None), state)
    assert updates["w"].dtype == dtype
    np.testing.assert_array_equal(updates["w"], np.ones(2))  # a bfloat16 sum of 1000 ones would stop at 256
    chex.assert_trees_all_equal_shapes_and_dtypes(state, after)


@pytest.mark.parametrize(
    ("batch", "included", "message"),
    [
        ({"x": jnp.ones((4, 5)), "y": jnp.ones((3, 3))}, None, "examples on axis 0"),
        ({"x": jnp.ones((4, 5)), "y": jnp.ones(())}, None, "examples on axis 0"),
        ({"x": jnp.ones((4, 5)), "y": jnp.ones((4, 3))}, jnp.ones(3, bool), "included must have shape"),
        ({"x": jnp.ones((4, 5)), "y": jnp.ones((4, 3))}, jnp.ones((4, 1), bool), "included must have shape"),
        ({"x": jnp.ones((4, 5)), "y": jnp.ones((4, 3))}, jnp.ones(4), "included must be bool.*got float32"),
        ({"x": jnp.ones((4, 5)), "y": jnp.ones((4, 3))}, jnp.ones(4, jnp.int32), "included must be bool.*got int32"),
        ({}, None, "examples on axis 0"),
    ],
)
def test_bad_shapes(batch, included, message):
    params, _ = model()
    mechanism = dp_sgd()
    with pytest.raises(ValueError, match=message):
        dpx.private_updates(loss, mechanism)(params, dpx.Batch(batch, included), mechanism.init(params))


def test_bad_arguments():
    params, batch = model()
    with pytest.raises(ValueError, match=r"has_aux=True.*must return \(value, aux\)"):
        dpx.private_updates(loss, dp_sgd(), has_aux=True)(params, dpx.Batch(batch, None), dp_sgd().init(params))
    for size in (0, -1, 2.5):
        with pytest.raises(ValueError, match="microbatch_size"):
            dpx.private_updates(loss, dp_sgd(), microbatch_size=size)  # type: ignore
    with pytest.raises(ValueError, match="dpx.chain"):
        dpx.private_updates(loss, optax.chain(dp_sgd(), optax.sgd(0.1)))  # type: ignore
    with pytest.raises(ValueError, match="second one"):
        dpx.chain(dp_sgd(), dp_sgd())
    with pytest.raises(ValueError, match="exactly one"):
        dpx.accounting.steps_taken(optax.sgd(0.1).init(params))
    mechanism = dp_sgd(clip_norm={"w": 1.0, "c": 1.0})
    with pytest.raises(ValueError):
        dpx.private_updates(loss, mechanism)(params, dpx.Batch(batch, None), mechanism.init(params))
    for plain in (batch, (batch, None), jnp.ones((4, 5))):
        with pytest.raises(ValueError, match=r"dpx.Batch\(examples, included=None\) if every row counts"):
            dpx.private_updates(loss, dp_sgd())(params, plain, dp_sgd().init(params))
    for mask in ({"w": False, "b": False}, {"w": 1}, {}):
        with pytest.raises(ValueError, match="mask"):
            dpx.coordinates.trainable(mask=mask)


def local_steps(params, user, key):
    """What two steps of a user on examples of their own, up to four, take away from the parameters."""

    def mean_loss(params):
        return jnp.mean(jax.vmap(loss, (None, 0))(params, user["examples"]), where=user["real"])

    moved = params
    for _ in range(2):
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, moved, jax.grad(mean_loss)(moved))
    return jax.tree.map(jnp.subtract, params, moved), {"examples": user["real"].sum(), "key": jax.random.key_data(key)}


def test_an_update_of_each_user():
    """Their updates are clipped as gradients are; a user's padding is the user's own affair."""
    params, batch = model()
    users = {
        "examples": jax.tree.map(lambda rows: rows.reshape(4, 4, -1), batch),
        "real": jnp.tril(jnp.ones((4, 4), bool)),
    }
    mechanism = dp_sgd(noise_multiplier=1.0, clip_norm=0.5)
    state, included = mechanism.init(params), jnp.array([True, True, False, True])
    step = dpx.private_updates_from(local_steps, mechanism, microbatch_size=3, with_key=True, has_aux=True)
    found = jax.jit(step)(params, dpx.Batch(users, included), state)

    @jax.jit
    def by_hand(params, users):
        updates, aux = jax.vmap(local_steps, (None, 0, 0))(params, users, jax.random.split(jax.random.key(0), 4))
        expected = mechanism.update(updates, state, params, included=included)
        return expected, jax.vmap(optax.tree.norm)(updates), aux

    expected, norms, aux = by_hand(params, users)
    chex.assert_trees_all_close(found[:2], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.unreleased.norms, norms, rtol=1e-5)
    np.testing.assert_array_equal(found.unreleased.aux["examples"], aux["examples"])
    assert found.unreleased.losses is None and len(np.unique(found.unreleased.aux["key"], axis=0)) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda params: params | {"w": params["w"].T}, r"of shapes .*'w': \(5, 3\).*; got shapes .*'w': \(3, 5\)"),
        (lambda params: params["w"], r"of shapes \{'b'.*; got shapes \(5, 3\)"),
        (lambda params: list(params.values()), "like params, of shapes"),
        (lambda params: jax.tree.map(lambda p: p.astype(jnp.complex64), params), "must be real"),
    ],
    ids=["shape", "leaf", "structure", "complex"],
)
def test_an_update_that_is_not_like_the_parameters(change, message):
    params, batch = model()
    step = dpx.private_updates_from(lambda params, unit: change(params), dp_sgd())
    with pytest.raises(ValueError, match=message):
        step(params, dpx.Batch(batch, None), dp_sgd().init(params))


class WithBatchNorm(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("nest", [lambda params: params, lambda params: {"layers": [params]}], ids=["whole", "nested"])
def test_flax_modules_and_batch_statistics_are_refused(nest):
    """In words, before any step; what may be trained is not."""
    module = WithBatchNorm()
    _, everything = nnx.split(module)
    collections = {"params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(2)}}
    refused = [(module, "the module WithBatchNorm.*nnx.split"), (everything, "norm.*mean.*GroupNorm")]
    batch, state = dpx.Batch(jnp.ones((4, 2)), None), dp_sgd().init({"w": jnp.ones(2)})
    for params, message in (*refused, (collections, "batch_stats.*BatchNorm mixes.*LayerNorm")):
        with pytest.raises(ValueError, match=message):
            dp_sgd().init(nest(params))
        with pytest.raises(ValueError, match=message):
            dpx.private_updates(lambda params, x: x[0], dp_sgd())(nest(params), batch, state)
    for params in (nnx.split(module, nnx.Param, ...)[1], {"params": collections["params"]}):
        assert dpx.accounting.steps_taken(dp_sgd().init(nest(params))) == 0


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import dpx
from dpx.fitting.step import first_carry
from tests.test_dp_sgd import dp_sgd
def loss(params, example, key):
    kept = jax.random.bernoulli(key, 0.5, (8,))
    return jnp.sum(jnp.tanh(example["x"] * kept @ params["w"] + params["b"]) - example["y"])
params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(8, 16)), jnp.float32), "b": jnp.ones(16)}
batch = {"x": jnp.asarray(np.random.default_rng(2).normal(size=(24, 8)), jnp.float32), "y": jnp.ones(24)}
included = np.arange(24) % 5 != 0
optimizer = dpx.chain(dp_sgd(noise_multiplier=1.0), optax.trace(0.9))
step = dpx.private_updates(loss, optimizer, with_key=True)
def run(params, batch):
    return jax.jit(step)(params, dpx.Batch(batch, included), optimizer.init(params))
def share(array):
    return array.addressable_shards[0].data.size / array.size
one = run(params, batch)
assert len(jax.devices()) == 8
splits = {"replicated": {"w": P(), "b": P()}, "sharded": {"w": P(None, "data"), "b": P("data")}}
for kind, name in KINDS:
    kind = getattr(AxisType, kind)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    rows = jax.device_put(batch, NamedSharding(mesh, P("data")))
    placed = jax.tree.map(lambda p, s: jax.device_put(p, NamedSharding(mesh, s)), params, splits[name])
    eight = run(placed, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), eight, one)
    shares = {share(leaf) for leaf in jax.tree.leaves((eight.updates, eight.state.transforms))}
    assert shares == ({1 / 8} if name == "sharded" else {1.0}), (kind, name, shares)
    if kind == AxisType.Explicit:
        assert jax.tree.map(jax.typeof, eight.updates) == jax.tree.map(jax.typeof, placed)
        assert share(eight.unreleased.losses) == share(eight.unreleased.norms) == 1 / 8
if KINDS == [("Explicit", "sharded")]:
    inside = jax.jit(lambda p, r: step(p, dpx.Batch(r, included), optimizer.init(p)))(placed, rows)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), inside, one)
    steps, state = dpx.private_updates_in_chunks(loss, optimizer, with_key=True), optimizer.init(placed)
    sums = jax.jit(steps.add)(placed, dpx.Batch(rows, included), state)
    assert {share(leaf) for leaf in jax.tree.leaves(sums.unreleased_sums)} == {share(sums.unreleased.norms)} == {1 / 8}
    eight = jax.jit(steps.release)(placed, sums, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), eight, one[:2])
    assert jax.tree.map(jax.typeof, eight[0]) == jax.tree.map(jax.typeof, placed)
    frozen = dpx.coordinates.random_freeze(freeze_rate=0.5, every=1, key=jax.random.key(5))
    first_carry(params, dpx.in_coordinates(dp_sgd(), frozen), NamedSharding(mesh, P("data")))  # draws a mask eagerly
print("the same on 8 devices")
"""


@pytest.mark.parametrize(
    "kinds",
    [[("Explicit", "sharded")], [("Explicit", "replicated"), ("Auto", "sharded")]],
    ids=["explicit", "replicated and auto"],
)
@pytest.mark.long_cases("replicated")
def test_the_same_noise_on_eight_devices(kinds):
    """tests/test_sharded_programs.py and tests/test_sampling_paths.py have axes that are not explicit, too."""
    assert "the same on 8 devices" in on_eight_devices(f"KINDS = {kinds}\n{SHARDED}")
