"""Every finding of `dpx.check_setup`: a program that has the fault, and one that has not."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import dpx
from dpx.audit.setup import batch_findings, static_findings

KEY, STEPS, ROWS = dpx.secret_key(2**40 + 5), 20, 8
SAMPLING = dpx.PoissonSampling(examples=40, batch_size=6)
BUDGET = dpx.Budget(epsilon=4.0, delta=1e-3, steps=STEPS)
EXAMPLE = jnp.zeros(5)


def dp_sgd(**options):
    return dpx.dp_sgd(**{"clip_norm": 1.0, "noise_multiplier": 1.0, "sampling": SAMPLING, "key": KEY} | options)


def data(seed=0):
    return np.random.default_rng(seed).normal(size=(40, 5)).astype(np.float32)


def params():
    return {"w": jnp.ones(5), "b": jnp.zeros(())}


def loss(params, x):
    return (x @ params["w"] + params["b"] - 1) ** 2


def drawn(optimizer, rows=None):
    return SAMPLING.take(data() if rows is None else rows, KEY, optimizer.init(params()), size=ROWS)


@functools.cache
def good(seed=0):
    """The report of a program without a fault; it has a budget, a key and an aux."""
    optimizer = dpx.chain(dp_sgd(noise_multiplier=BUDGET), optax.sgd(0.1))

    def with_more(params, x, key):
        return loss(params, x) + 0 * jax.random.uniform(key), x

    batch = drawn(optimizer, data(seed))
    return dpx.check_setup(with_more, optimizer, params(), batch, data=data(seed), with_key=True, has_aux=True)


@jax.custom_batching.custom_vmap
def centered(x):
    return x


@centered.def_vmap
def _(size, batched, x):
    return x - x.mean(0, keepdims=True), True


@functools.cache
def faulty():
    """Of a loss with every fault, and a plan with some."""
    table = jnp.asarray(data())

    def mixes(params, x):
        spread = jax.lax.stop_gradient(params["stopped"]) + (table @ x).sum()
        return 1e-4 * (loss(params, centered(x)) + 0 * spread)

    tree = params() | {"unused": jnp.ones(2), "stopped": jnp.ones(())}
    optimizer = dp_sgd(clip_norm=1.0, noise_multiplier=100.0)
    batch = dpx.Batch(data()[:4], np.ones(4, bool))
    return dpx.check_setup(mixes, optimizer, tree, batch, delta=0.1, steps=3)


@functools.cache
def adapted():
    """Of an adapter of two matrices, one of which is zero, so that the other has no gradient yet."""

    def adapts(params, x):
        return loss({"w": params["w"], "b": x @ params["a"] @ params["c"]}, x)

    tree = {"w": jnp.ones(5), "a": jnp.ones((5, 2)), "c": jnp.zeros(2)}
    return dpx.check_setup(adapts, dp_sgd(), tree, dpx.Batch(data()[:4], np.ones(4, bool)))


@functools.cache
def grouped():
    """Of a convolution in groups, whose kernel gradients `jax.vmap` mixes where a row holds NaN."""

    def convolves(params, x):
        return jnp.sum(jax.lax.conv_general_dilated(x, params["k"], (1,), "SAME", feature_group_count=2) ** 2)

    batch = dpx.Batch(data().reshape(-1, 1, 4, 5)[:4], np.ones(4, bool))
    return dpx.check_setup(convolves, dp_sgd(), {"k": jnp.ones((2, 2, 3))}, batch)


@functools.cache
def iterating():
    """Of a loss with a function that jax computes by one loop over all rows."""

    def of_tail(params, x):
        return jax.lax.betainc(jnp.float32(2), jnp.float32(3), jax.lax.logistic(x @ params["w"] + params["b"]))

    return dpx.check_setup(of_tail, dp_sgd(), params(), dpx.Batch(data()[:4], np.ones(4, bool)))


@functools.cache
def low():
    """Of bfloat16 parameters, half of whose rows overflow."""
    tree = {"w": jnp.full(5, 100.0, jnp.bfloat16), "b": jnp.zeros((), jnp.bfloat16)}

    def overflows(params, x):
        x = x.astype(jnp.bfloat16)
        return (jnp.sum(x * params["w"]) + params["b"]) ** 2

    rows = data()[:6].copy()
    rows[:3] = np.inf
    rows[3:4] = 3e19
    frozen = dpx.in_coordinates(dp_sgd(noise_multiplier=0.0), dpx.coordinates.trainable(mask={"w": True, "b": False}))
    optimizer = dpx.chain(frozen, optax.add_decayed_weights(1e-4))
    return dpx.check_setup(overflows, optimizer, tree, dpx.Batch(rows, np.arange(6) != 5), delta=1e-3, steps=3)


@functools.cache
def broken():
    """Of what cannot be run: whole numbers among the parameters, more rows than are drawn, data of another length."""
    optimizer = dp_sgd(sampling=dpx.FixedSizeSampling(examples=40, batch_size=6), noise_multiplier=0.0)
    tree = params() | {"count": jnp.zeros((), jnp.int32)}
    batch = dpx.Batch(data()[:8], np.ones(8, bool))
    return dpx.check_setup(loss, optimizer, tree, batch, data=data()[:39], steps=10, delta=1e-3)


def test_a_program_without_a_fault():
    report = good()
    assert {finding.severity for finding in report.findings} == {"ok"}, str(report)
    assert len(report.findings) == 21 and repr(report) == "SetupReport(error: 0, warning: 0, note: 0, ok: 21)"
    assert report["privacy"].numbers["epsilon"] == pytest.approx(4.0, abs=0.01)
    assert report["time"].numbers["run_seconds"] > STEPS * report["time"].numbers["seconds"] > 0
    assert report["memory"].numbers["argument_bytes"] >= ROWS * 5 * 4
    assert report["batch"].numbers["rows"] == ROWS


FAULTS = [
    (faulty, "closures", "warning", "array of shape (40, 5)"),
    (faulty, "batching rules", "warning", "custom_vmap_call"),
    (faulty, "mixing", "error", "3 of 3 rows"),
    (faulty, "hostile rows", "warning", "changes 3 other rows"),
    (grouped, "hostile rows", "warning", "changes 3 other rows"),
    (iterating, "hostile rows", "warning", "JAX computes regularized_incomplete_beta until all rows have converged"),
    (faulty, "unused parameters", "warning", "does not use unused;"),
    (faulty, "zero gradients", "warning", "stopped, unused have no gradient"),
    (adapted, "zero gradients", "note", "a have no gradient in any row, but get noise; at other parameters they"),
    (faulty, "clipping", "warning", "0% of 4 rows reach the bound 1;"),
    (faulty, "noise", "warning", "larger batches"),
    (faulty, "delta", "warning", "at least 1 / 40"),
    (faulty, "drawn", "note", "not of `sampling.take`"),
    (low, "finite", "warning", "of 5 rows, 4 have a loss and 4 a gradient that is not finite"),
    (low, "precision", "warning", "w (bfloat16): 100% of the updates"),
    (low, "privacy", "error", "adds no noise"),
    (low, "trained", "ok", "5 of 6 parameters are trained"),
    (broken, "parameter dtypes", "error", "count (int32)"),
    (broken, "batch", "error", "8 of 8 rows count, and 6 are expected"),
    (broken, "data", "error", "39 rows, and epsilon is for 40"),
]


@pytest.mark.parametrize(
    ("report", "name", "severity", "words"), FAULTS, ids=lambda part: getattr(part, "__name__", part)
)
@pytest.mark.long_cases("adapted-", "grouped-")
def test_a_fault_is_found(report, name, severity, words):
    finding = report()[name]
    assert finding.severity == severity and words in finding.words, finding


def test_what_cut_batches_cost():
    for most, severity in ((6, "warning"), (40, "ok")):
        mechanism = dp_sgd(sampling=dpx.PoissonSampling(examples=40, batch_size=6, most_rows=most))
        (finding,) = static_findings.find_truncation_cost(mechanism, 20, 1e-3)
        whole, cut = finding.numbers["epsilon of batches that are not cut"], finding.numbers["epsilon"]
        assert finding.severity == severity and (cut > 1.01 * whole) == (severity == "warning")
        assert f"most_rows = {most} costs {cut / whole - 1:.2%}" in finding.words
    assert not static_findings.find_truncation_cost(mechanism, None, 1e-3) and not static_findings.find_truncation_cost(
        dp_sgd(), 20, 1e-3
    )
    rows = dpx.Batch(np.zeros((6, 2)), np.arange(6) < 3)
    assert (
        static_findings.rows_that_count(rows, dpx.PoissonSampling(examples=40, batch_size=6, most_rows=6))[1].severity
        == "ok"
    )
    assert (
        static_findings.rows_that_count(rows, dpx.FixedSizeSampling(examples=40, batch_size=6))[1].severity == "warning"
    )


@pytest.mark.parametrize(
    ("signal", "steps", "severity", "said"),
    [(1, 100, "ok", "2.4 times"), (1, None, "ok", "square root"), (48, 100, "ok", ""), (0.2, 100, "warning", "")],
)
def test_a_noise_above_the_signal_says_why_it_is_ok(signal, steps, severity, said):
    """The noise of a mean over 576 coordinates is 24 times a signal of 1, and falls by 10 over 100 steps."""
    batch = batch_findings.BatchDiagnostics(
        *[jnp.ones(1)] * 5, signal=jnp.float32(signal), bound=jnp.float32(1), size=576, reached=0
    )
    finding = batch_findings.find_noise_to_signal(batch, dp_sgd(), steps)
    assert finding.severity == severity
    assert ("24 times" in finding.words and said in finding.words) == bool(said), finding.words


def test_the_numbers_are_those_of_the_gradients():
    optimizer = dp_sgd(clip_norm=8.0)
    batch = drawn(optimizer)
    found = dpx.check_setup(loss, optimizer, params(), batch, delta=1e-3)
    grads = jax.vmap(jax.grad(loss), (None, 0))(params(), batch.examples)
    grads = np.concatenate([grads["w"], grads["b"][:, None]], 1)[batch.included]
    norms = np.linalg.norm(grads, axis=1)
    clipped = grads * np.minimum(1, 8 / norms)[:, None]
    assert found["clipping"].numbers["clipped"] == pytest.approx((norms >= 8).mean())
    assert 0 < found["clipping"].numbers["clipped"] < 1
    assert found["clipping"].numbers["median"] == pytest.approx(np.median(norms), rel=1e-4)
    assert found["noise"].numbers["signal"] == pytest.approx(np.linalg.norm(clipped.sum(0)) / 6, rel=1e-4)
    assert found["noise"].numbers["noise"] == pytest.approx(8 * 6**0.5 / 6, rel=1e-4)
    assert found["privacy"].severity == "note" and "run_seconds" not in found["time"].numbers


def checked(loss, *, key=KEY, with_key=False):
    report = dpx.check_setup(
        loss, dp_sgd(key=key), params(), dpx.Batch(data()[:4], np.ones(4, bool)), with_key=with_key
    )
    return {name: report[name].severity for name in ("randomness", "key")}


def noisy(params, x, key, rate=0.5):
    return loss(params, jnp.where(jax.random.bernoulli(key, rate, x.shape), x, 0))


def in_a_loop(params, x, key):
    """The key is carried along, and split, as layers of a scan do."""

    def layer(carry, _):
        x, key = carry
        key, own = jax.random.split(key)
        return (jnp.tanh(x) * jax.random.uniform(own, x.shape), key), None

    (x, _), _ = jax.lax.scan(layer, (x, key), length=2)
    return loss(params, x)


def before_it_is_folded(params, x, key):
    """In the first turn of the loop, the key is that before it."""

    def layer(carry, _):
        x, key = carry
        drawn = x * jax.random.uniform(key, x.shape)
        return (drawn, jax.random.fold_in(key, x[0].astype(jnp.int32))), None

    (x, _), _ = jax.lax.scan(layer, (x, key), length=2)
    return loss(params, x)


def in_a_branch(params, x, key):
    return jax.lax.cond(x[0] > 0, lambda: noisy(params, x, key), lambda: loss(params, x))


def while_positive(params, x, key):
    body = lambda carry: (carry[0] - 1, carry[1] * jax.random.uniform(key, x.shape))  # noqa: E731
    return loss(params, jax.lax.while_loop(lambda carry: carry[0] > 0, body, (2, x))[1])


def checkpointed(params, x, key):
    return jax.checkpoint(lambda x: noisy(params, x, key))(x)


def constant_keys(loss, *, with_key=False):
    """The finding alone: the next test has it from `dpx.check_setup`."""
    return static_findings.find_constant_keys(loss, params(), EXAMPLE, with_key=with_key).severity


@pytest.mark.parametrize("draws", [noisy, in_a_loop, before_it_is_folded, in_a_branch, while_positive, checkpointed])
@pytest.mark.parametrize("raw", [False, True])
def test_random_numbers_of_a_constant_key_are_noticed(draws, raw):
    constant, of_parameters = jax.random.PRNGKey(3) if raw else jax.random.key(3), jax.random.key(1)
    assert constant_keys(lambda params, x: draws(params, x, constant)) == "warning"
    assert constant_keys(lambda params, x, _: draws(params, x, constant), with_key=True) == "warning"
    assert constant_keys(draws, with_key=True) == "ok"
    if not raw:

        def of_a_parameter(params, x):
            return draws(params, x, jax.random.fold_in(of_parameters, params["b"].astype(jnp.int32)))

        def of_the_example(params, x):
            return draws(params, x, jax.random.fold_in(of_parameters, x[0].astype(jnp.int32)))

        assert constant_keys(of_a_parameter) == "warning"
        assert constant_keys(of_the_example) == "ok"


def test_random_features_that_are_drawn_before_the_loss_are_fixed_on_purpose():
    key, example = jax.random.key(3), data()[0]

    def features(x):
        return jnp.cos(jax.random.normal(key, (*x.shape, *x.shape)) @ x)

    report = dpx.check_setup(
        lambda p, x: loss(p, features(x)), dp_sgd(), params(), dpx.Batch(data()[:4], np.ones(4, bool))
    )
    assert report["randomness"].severity == "warning" and "draw them before the loss" in report["randomness"].words
    drawn = jax.random.normal(key, (*example.shape, *example.shape))
    assert checked(lambda p, x: loss(p, jnp.cos(drawn @ x)))["randomness"] == "ok"


def test_a_dropout_of_flax_that_is_not_reseeded_is_noticed():
    model = nnx.Sequential(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)

    def dropped(params, x):
        return loss(params, nnx.merge(graph, state, copy=True)(x))

    def reseeded(params, x, key):
        made = nnx.merge(graph, state, copy=True)
        nnx.reseed(made, default=key)
        return loss(params, made(x))

    assert checked(dropped)["randomness"] == "warning"
    assert checked(reseeded, with_key=True)["randomness"] == "ok"


def test_a_key_that_can_be_guessed_is_noticed():
    assert checked(loss)["key"] == "ok" and checked(loss, key=jax.random.key(0))["key"] == "warning"


def test_the_table_marks_what_is_not_private():
    """Also in the public part of a report; what is public is the same for other data."""
    lines = str(faulty()).splitlines()
    assert lines[0].startswith("error    mixing *") and lines[-1].startswith("* computed from raw data")
    assert not any(line.startswith("error") for line in lines[1:])
    public = dpx.publishable_state(good())
    assert public.unreleased_findings is None and "*" not in str(public)
    other = {finding.name: finding for finding in good(1).public_findings}
    for finding in good().public_findings:
        if finding.name != "time":
            assert finding == other[finding.name]


def test_the_step_that_is_timed_releases_no_data():
    """Only noise, so that the noise of the run stays secret where the run releases data with it."""
    optimizer = dp_sgd()
    noise = [
        batch_findings.run_empty_step(loss, optimizer, params(), dpx.Batch(rows[:ROWS], np.ones(ROWS, bool)))
        for rows in (data(), data(1))
    ]
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a == b).all(), *[n.unreleased_updates for n in noise])))
    kept = [field.name for field in dataclasses.fields(dpx.audit.setup.SetupReport)]
    assert kept == ["public_findings", "unreleased_findings"]  # no updates among them


def test_closures_are_found_wherever_they_are():
    """In loops, in functions with a jit of their own, and as literals; also callbacks there, and named axes."""
    rows = jnp.asarray(data())

    def inside(params, x):
        jax.debug.callback(lambda x: None, x)
        total = jax.lax.scan(lambda c, _: (c + jax.jit(lambda x: (rows @ x).sum())(x), None), 0.0, length=2)[0]
        return total + loss(params, x)

    closed = static_findings.trace_or_finding(inside, params(), EXAMPLE)
    assert static_findings.find_closed_over_arrays(closed, EXAMPLE, ROWS, 40).numbers["suspects"] == 1
    assert "callback" in static_findings.find_batch_dependence(closed).words

    large = jnp.ones((600, 600))
    closed = static_findings.trace_or_finding(
        lambda params, x: loss(params, x) + (large @ jnp.ones(600)).sum(), params(), EXAMPLE
    )
    assert static_findings.find_closed_over_arrays(closed, EXAMPLE, ROWS, 40).severity == "note"
    some_rows = jnp.asarray(data()[:7])
    closed = static_findings.trace_or_finding(
        lambda params, x: loss(params, x) + (some_rows @ x).sum(), params(), EXAMPLE
    )
    assert static_findings.find_closed_over_arrays(closed, EXAMPLE, ROWS, 40).severity == "warning"
    axes = static_findings.trace_or_finding(
        lambda params, x: jax.lax.pmean(loss(params, x), "batch"), params(), EXAMPLE
    )
    assert axes.name == "named axes" and axes.severity == "error"


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit, jax.checkpoint])
def test_running_averages_that_nothing_keeps(wrap):
    old, is_first = jnp.ones((1, 4)), jnp.asarray(True)

    @wrap
    def normalized(params, x):
        mean = jnp.mean(x, 0, keepdims=True)
        average = 0.99 * old + jax.lax.sub(np.float32(1), np.float32(0.99)) * mean
        return jnp.sum((x - mean) ** 2) * jnp.sum(params), average, jax.lax.select(is_first, mean, average)

    def found(loss):
        return static_findings.find_lost_averages(jax.make_jaxpr(loss)(jnp.ones(4), jnp.ones((3, 4))), jnp.ones(4))

    for kept in (0, 2):
        (finding,) = found(lambda params, x, kept=kept: jnp.sum(normalized(params, x)[kept]))
        assert finding.severity == "warning" and finding.numbers == {"averages": 1}
    assert not found(lambda params, x: jnp.sum(normalized(params, x)[1]))
    assert found(lambda params, x: (jnp.sum(normalized(params, x)[0]), normalized(params, x)[1])), "aux keeps nothing"


def test_small_differences_of_the_plan():
    """Findings between a good plan and a broken one, without running anything."""
    optimizer, batch = dp_sgd(noise_multiplier=BUDGET), drawn(dp_sgd())
    assert static_findings.find_epsilon_of_run(optimizer, 2 * STEPS, 1e-3).severity == "warning"
    assert static_findings.find_epsilon_of_run(dp_sgd(noise_multiplier=0.3), STEPS, 1e-3).severity == "note"
    assert (
        static_findings.find_delta_size(None, SAMPLING).severity
        == static_findings.find_epsilon_of_run(dp_sgd(), None, None).severity
        == "note"
    )
    other_rows = static_findings.rows_that_count(
        batch._replace(included=batch.included & (np.arange(ROWS) > 0)), SAMPLING
    )[1]
    assert other_rows.severity == "error" and "`take` drew" in other_rows.words
    all_rows = static_findings.rows_that_count(dpx.Batch(data(), np.ones(40, bool)), SAMPLING)[1]
    assert all_rows.severity == "warning" and all_rows.numbers["included"] == 40
    fixed = dpx.FixedSizeSampling(examples=40, batch_size=6)
    assert static_findings.rows_that_count(dpx.Batch(data()[:5], None), fixed)[1].severity == "error"
    assert static_findings.rows_that_count(dpx.Batch(data()[:6], np.arange(6) < 5), fixed)[1].severity == "warning"
    still = batch_findings.StepOfPureNoise(params(), 0.0, 0.0, None, None)
    flags = {"w": True, "b": True}
    assert (
        batch_findings.find_low_precision_parameters(still, params(), flags, jnp.zeros(3, jnp.bfloat16)).severity
        == "note"
    )
    assert batch_findings.find_step_memory(still).severity == "note"


def test_bad_input():
    optimizer, batch = dp_sgd(), dpx.Batch(data()[:4], np.ones(4, bool))
    for arguments, words in [
        ((loss, optax.sgd(0.1), params(), batch), "must be a dpx Mechanism"),
        ((loss, optimizer, params(), data()[:4]), "batch must be a dpx.Batch"),
        ((loss, optimizer, params(), dpx.Batch(data()[:0], np.ones(0, bool))), "at least one row"),
        ((loss, optimizer, {}, batch), "at least one array"),
        ((None, optimizer, params(), batch), "loss must be a function"),
        ((lambda params, x: x, optimizer, params(), batch), "loss must return one real number"),
    ]:
        with pytest.raises(ValueError, match=words):
            dpx.check_setup(*arguments)
    for options, words in [({"steps": 0}, "steps must be"), ({"delta": 1.0}, "delta must be in")]:
        with pytest.raises(ValueError, match=words):
            dpx.check_setup(loss, optimizer, params(), batch, **options)
